"""Which device a rank computes on."""

import ctypes

import torch

from fedmpi.errors import ConfigError

LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")


def local_rank(environ) -> int:
    """This rank's number on its host, as the launcher tells it; 0 if it does not."""
    return next((int(environ[name]) for name in LOCAL_RANK if environ.get(name, "").isdecimal()), 0)


def pick_device(setting: str, environ, device_count: int | None = None) -> str:
    """`auto` spreads ranks over the visible GPUs: local rank modulo their number. CUDA_VISIBLE_DEVICES is honoured because
    torch counts and numbers only what it lists. Written for GPU clusters; the arithmetic is tested, the hardware is not.
    """
    count = torch.cuda.device_count() if device_count is None else device_count
    if setting == "cpu" or (setting == "auto" and count == 0):
        return "cpu"
    if setting not in ("auto", "cuda") and not (setting.startswith("cuda:") and setting[5:].isdecimal()):
        raise ConfigError(f"device = {setting}: must be auto, cpu, cuda or cuda:N")
    if count == 0:
        raise ConfigError(f"device = {setting}: torch sees no GPU here")
    if setting.startswith("cuda:"):
        if int(setting[5:]) >= count:
            raise ConfigError(f"device = {setting}: torch sees {count} GPUs, cuda:0 to cuda:{count - 1}")
        return setting
    return f"cuda:{local_rank(environ) % count}"


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed. Activations of a batch are megabytes each: by default large ones
    are mapped anew every time, and the top of the heap can go back to the system in every step and be cleared page by page in the
    next (benchmarks.step_cost shows what that costs). False where the C library knows no mallopt.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30) and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))
