"""Whether a name can be a hub id at all here: without a network, asking takes half a minute of retries."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

DEFAULT_ENDPOINT = "https://huggingface.co"


def unreachable_hub(model: str) -> str | None:
    """Why a name that is no directory here need not be asked of the hub; None to let Transformers try.

    Asked of what is no directory, is not in the hub's cache, and when neither a proxy nor the offline switch is set.
    """
    if Path(model).exists() or getproxies() or os.environ.get("HF_HUB_OFFLINE") or _cached(model):
        return None
    endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    url = urlsplit(endpoint)
    try:
        socket.getaddrinfo(url.hostname, url.port or 443)
    except OSError as error:
        return f"{model} is no directory here, and {endpoint} cannot be reached: {error.strerror}"
    return None


def _cached(model: str) -> bool:
    """As huggingface_hub lays its cache out; it may not be installed."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or user / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return (cache / f"models--{model.replace('/', '--')}").exists()
