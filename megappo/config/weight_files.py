"""The safetensors files of a Hugging Face folder, known again without reading them whole. Imports no torch."""

import zlib
from pathlib import Path

from megappo.config.checkpoint_names import readable

END_BYTES = 1 << 20
"""What is read of either end of a file: its header with all names and shapes, and weights of both ends."""


def weight_files(folder: Path) -> dict[str, list[int]]:
    """[bytes, CRC-32 of the first and last MiB] of each safetensors file in `folder`, by its name; none where there is
    no such folder."""
    return {file.name: _fingerprint(file) for file in sorted(readable(folder).glob("*.safetensors"))}


def _fingerprint(file: Path) -> list[int]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        crc = zlib.crc32(stream.read(END_BYTES))
        stream.seek(max(size - END_BYTES, 0))
        return [size, zlib.crc32(stream.read(END_BYTES), crc)]
