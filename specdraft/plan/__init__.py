"""What a run will take: bytes on disk and in memory, optimizer steps, time, for this machine and for named GPUs."""
