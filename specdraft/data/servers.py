"""Answers by the target behind OpenAI-compatible servers: examined first, then asked, every reply checked."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from specdraft.core.errors import ConfigError
from specdraft.data._config import DataConfig
from specdraft.data.answering import Job, cut
from specdraft.data.background import in_background
from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.journal import EOS, LENGTH, NO_TOKENS, REFUSED, Answer
from specdraft.data.own_answers import greedy_gaps
from specdraft.data.server_client import Client, FaultError, RefusedError
from specdraft.data.server_pool import Endpoint, Pool
from specdraft.data.server_route import Form, Reply, Route, forms

if TYPE_CHECKING:
    from specdraft.targets.facts import TargetFacts
    from specdraft.targets.hf import HFTarget

PROBE_TOKENS = 16
MAX_GAP = 1.0
"""How far below the target's best logit a server's greedy token may be: number formats differ, models differ more."""

logger = logging.getLogger(__name__)


class ServerWriter:
    """The target behind ``config.answers.endpoints``.

    An endpoint is examined before its first answer: whether it serves the model by its name, which form of request it
    takes, whether it leaves the prompt's tokens alone, and, where the target is loaded, whether its greedy tokens are
    the target's.

    Args:
        config: the settings.
        renderer: our own template, which makes the prompts.
        facts: of the target.
        target: compared with the servers; None = it is not loaded.
        world_size: processes that share the limit of requests a minute.

    Raises:
        ConfigError: there is no environment variable of the name given for the key.
    """

    def __init__(
        self,
        config: DataConfig,
        renderer: ChatRenderer,
        facts: TargetFacts,
        target: HFTarget | None = None,
        world_size: int = 1,
    ) -> None:
        self.settings = config.answers
        self.renderer = renderer
        self.facts = facts
        self.target = target
        self.eos = frozenset(facts.eos_token_ids)
        self.max_new_tokens = config.max_new_tokens
        self.route = Route(config.answers, renderer, facts.eos_token_ids, config.max_new_tokens)
        self._world_size = world_size
        self._key = _key(config.answers.api_key_env)
        self._endpoints = [Endpoint(url.rstrip("/")) for url in config.answers.endpoints]
        self._forms: dict[str, Form] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._probes: Sequence[Job] = ()
        # Where a server tells that an answer ended but not with what.
        ends = [token for token in renderer.end_of_turn_ids[:1] if token in self.eos]
        self._end = [*ends, *sorted(self.eos)][:1]

    @property
    def max_length(self) -> int:
        """The target's context; what is too long for a server's own, it refuses."""
        return self.facts.max_position_embeddings

    def write(self, jobs: Sequence[Job]) -> Generator[list[Answer], None, None]:
        """See AnswerWriter.

        Raises:
            ConfigError: a server has another model, changes prompts, refuses the key or every request.
            DataError: some answers could not be had, or no server answers.
        """
        if not jobs:
            return

        async def work(emit: Callable[[Answer], None]) -> None:
            self._locks = {endpoint.url: asyncio.Lock() for endpoint in self._endpoints}
            # Short ones, which every server has room for.
            probes = nsmallest(max(1, self.settings.probes), jobs, key=lambda job: len(job.prompt_ids))
            self._probes = [replace(job, temperature=0.0) for job in probes]
            client = Client(self.settings, self._key)
            try:
                pool: Pool[Job, Answer] = Pool(
                    self.settings,
                    self._endpoints,
                    lambda endpoint, job: self._send(client, endpoint, job),
                    lambda job: job.answer([], REFUSED, "server"),
                    self._world_size,
                )
                await pool.run(jobs, emit)
            finally:
                await client.close()

        yield from in_background(work)

    async def _send(self, client: Client, endpoint: Endpoint, job: Job) -> Answer:
        """One answer from an endpoint, which is examined before the first."""
        async with self._locks[endpoint.url]:
            if endpoint.url not in self._forms:
                endpoint.check()  # another request may have found out meanwhile
                self._forms[endpoint.url] = await self._examine(client, endpoint)
        body = self.route.request(job, self._forms[endpoint.url])
        reply = self.route.read(await client.call("POST", self.route.url(endpoint.url), body))
        return self._answer(endpoint, job, reply)

    async def _examine(self, client: Client, endpoint: Endpoint) -> Form:
        """The form of request that the endpoint takes.

        Raises:
            ConfigError: it is not the server that was meant.
            FaultError: it does not answer now.
        """
        try:
            await self._check_name(client, endpoint)
            form, replies = await self._find_form(client, endpoint)
        except FaultError as fault:
            # Whatever is wrong, no request can be sent there before this is known.
            raise FaultError(str(fault), of_endpoint=True, retry_after=fault.retry_after) from fault
        if self.target is None or not self.settings.probes:
            logger.info(
                "answers: %s, %s; the model behind the name was not compared with the target", endpoint.url, form
            )
            return form
        gaps = [
            gap for job, reply in zip(self._probes, replies, strict=True) for gap in self._gaps(endpoint, job, reply)
        ]
        if gaps and max(gaps) > MAX_GAP:
            raise ConfigError(
                f"data.answers.endpoints: {endpoint.url} serves another model than target.name, got greedy tokens up to "
                f"{max(gaps):.1f} below the target's best logit in {len(gaps)}; serve {self.facts.name} there"
            )
        logger.info(
            "answers: %s, %s; its greedy tokens are the target's, up to %.2f", endpoint.url, form, max(gaps, default=0)
        )
        return form

    async def _check_name(self, client: Client, endpoint: Endpoint) -> None:
        """Whether the server lists the model."""
        try:
            listed = (await client.call("GET", endpoint.url + "/models")).get("data")
        except RefusedError as error:
            logger.warning("answers: %s does not list its models (%s)", endpoint.url, error)
            return
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise FaultError("the reply of /models is no list")
        names = [str(entry.get("id")) for entry in listed]
        if self.settings.model not in names:
            raise ConfigError(
                f"data.answers.model: {endpoint.url} does not serve it, got {self.settings.model!r}; it serves "
                f"{', '.join(names) or 'nothing'}"
            )

    async def _find_form(self, client: Client, endpoint: Endpoint) -> tuple[Form, list[Reply]]:
        """The best form of request that the server takes, and its replies to the probes."""
        url, refusal = self.route.url(endpoint.url), ""
        for form in forms(self.settings):
            try:
                replies = []
                for job in self._probes:
                    body = self.route.request(job, form, min(PROBE_TOKENS, self.max_new_tokens))
                    replies.append(self.route.read(await client.call("POST", url, body)))
            except RefusedError as error:
                refusal = str(error)
                continue
            for job, reply in zip(self._probes, replies, strict=True):
                self._check_prompt(endpoint, job, reply)
            return form, replies
        raise ConfigError(
            f"data.answers.api: {url} refuses every form of request, got {refusal}; try another of data.answers.api and "
            "data.answers.prompts"
        )

    def _gaps(self, endpoint: Endpoint, job: Job, reply: Reply) -> list[float]:
        """See ``greedy_gaps``; nothing where the server gave no ids and its text is not that of its tokens."""
        assert self.target is not None
        ids = self._answer(endpoint, job, reply).answer_ids
        row = TokenRow([*job.prompt_ids, *ids], [False] * len(job.prompt_ids) + [True] * len(ids))
        return greedy_gaps(self.target, row) if ids else []

    def _check_prompt(self, endpoint: Endpoint, job: Job, reply: Reply) -> bool:
        """Whether the server read the tokens that were meant; of a chat they may be others.

        Raises:
            ConfigError: they are others.
        """
        told = len(reply.prompt_ids) if reply.prompt_ids is not None else reply.num_prompt
        same = (
            reply.prompt_ids == job.prompt_ids if reply.prompt_ids is not None else told in (None, len(job.prompt_ids))
        )
        if not same and self.settings.api != "chat":
            raise ConfigError(
                f"data.answers.prompts: {endpoint.url} changes the tokens of prompts, got {told} for "
                f"{len(job.prompt_ids)} of ours; use data.answers.prompts=ids, or serve the target with its own tokenizer"
            )
        return same

    def _answer(self, endpoint: Endpoint, job: Job, reply: Reply) -> Answer:
        """The answer that a reply holds, in the target's tokens."""
        same_prompt = self._check_prompt(endpoint, job, reply)
        if reply.ids is not None:
            ids, ids_from = reply.ids, "server"
            if ids and max(ids) >= self.facts.vocab_size:
                raise ConfigError(
                    f"data.answers.endpoints: {endpoint.url} serves another model than target.name, got token {max(ids)} "
                    f"of a vocabulary of {self.facts.vocab_size}; serve {self.facts.name} there"
                )
        else:
            # A replacement character stands for bytes that are no text, e.g. of a character cut in two.
            is_text = not reply.lacks_text and "\ufffd" not in reply.text
            found = self.renderer.continuation_ids(job.prompt_ids, reply.text) if is_text else None
            if found is None:
                return job.answer([], NO_TOKENS, "server")
            # The end that is not part of the text counts as a token.
            counts = (None, len(found), len(found) + (reply.finish == EOS))
            ids, ids_from = found, "text" if reply.num_tokens in counts else "text, by another count"
        if not same_prompt:
            ids_from += ", other prompt"
        ids, ended = cut(ids, self.eos)
        if ended == LENGTH and reply.finish == EOS:
            ids, ended = [*ids, *self._end], EOS
        if not ids:
            raise FaultError("the answer is empty and has no end")
        if len(ids) > self.max_new_tokens + 1:
            if reply.ids is not None:
                raise FaultError(f"the answer has {len(ids)} tokens where {self.max_new_tokens} were asked for")
            ids, ended = ids[: self.max_new_tokens], LENGTH
        return job.answer(ids, ended, ids_from)


def _key(variable: str | None) -> str | None:
    """The servers' key, from the environment and nowhere else."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"data.answers.api_key_env: there is no such environment variable, got {variable}; export it, or use null"
        )
    return key
