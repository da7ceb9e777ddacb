"""A short digest by which a base model is known again, whatever its folder is called."""

import os
from hashlib import blake2b
from pathlib import Path

_CHUNK = 1 << 16
_CHUNKS = 32
"""Read from each file of weights: other weights differ nearly everywhere, and a large model is not
to be read as a whole at every start."""


def base_digest(folder: Path) -> str | None:
    """Digest of a model folder's configuration and weights; None where it is no folder.

    Of each file of weights its name, its size and 32 chunks of 64 KiB, spread evenly, are taken.
    """
    if not (folder / "config.json").is_file():
        return None
    digest = blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for index in range(_CHUNKS):
                stream.seek(max(0, (size - _CHUNK) * index // (_CHUNKS - 1)), os.SEEK_SET)
                digest.update(stream.read(_CHUNK))
                if size <= _CHUNK:
                    break
    return digest.hexdigest()


def changed(base_model: str, digest: str | None) -> bool:
    """Whether the folder of a base model holds another model than it did.

    False where there is nothing to compare: a hub name, or a policy from before there were digests.
    """
    found = base_digest(Path(base_model)) if digest is not None else None
    return found is not None and found != digest
