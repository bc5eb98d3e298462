"""Memory of a process as PSS: pages shared by several ranks count once over all of them."""

import psutil


def proportional_set_size() -> int:
    """Bytes; where the system does not tell PSS, the resident size, which counts shared pages in full."""
    memory = psutil.Process().memory_full_info()
    return getattr(memory, "pss", memory.rss)
