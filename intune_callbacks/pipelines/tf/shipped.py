"""Libraries of our tf.data operations that come with a wheel, for machines without a compiler.

`intune build-tf --ship` compiles one for the installed TensorFlow into this package, from where a wheel takes it along.
A class that is laid out in another way would be noticed by a crash only, and a version does not say enough: so beside
each library stands which headers it was compiled against, with a digest of them all. It is used only where every one is
the same to the last bit, on a machine whose libc is as new as that of the one it was compiled on. It is not loaded to
find that out: where two libraries of one process have the same operations, TensorFlow refuses both.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path

__all__ = ["FOLDER", "find", "name_of", "note"]

FOLDER = Path(__file__).parents[1] / "native" / "built"


@functools.cache
def find(folder: Path, version: str, include: Path, source: str) -> Path | None:
    """Return the library that came for the installed TensorFlow, None if there is none; each is looked for once.

    Args:
        folder: where libraries lie that came with this package.
        version: of TensorFlow; a library of the same minor version may do.
        include: the folder of its headers.
        source: a digest of what else the library depends on: our source, the compiler's options, the machine.
    """
    minor = ".".join(version.split(".")[:2])
    for noted in sorted(folder.glob(f"tfdata-{minor}.*.json")):
        try:
            known = json.loads(noted.read_text(encoding="utf-8"))
            library = noted.with_suffix(".so")
            fits = known["source"] == source and _runs_on(known["libc"]) and library.exists()
            if fits and known["digest"] == _digest(include, known["headers"]):
                return library
        except (OSError, ValueError, KeyError, TypeError):  # headers that are not there, a file that is none of ours
            continue
    return None


def name_of(version: str, machine: str) -> str:
    """Return the file name of a library."""
    return f"tfdata-{version}-{machine}.so"


def note(library: Path, include: Path, headers: Iterable[Path], source: str) -> None:
    """Write beside a library what it was made from.

    Args:
        library: just compiled.
        include: the folder of TensorFlow's headers.
        headers: all that the compiler has read; those outside of the folder belong to the machine.
        source: as for `find`.
    """
    names = sorted({str(header.relative_to(include)) for header in headers if header.is_relative_to(include)})
    libc = list(platform.libc_ver())
    known = {"source": source, "libc": libc, "digest": _digest(include, names), "headers": names}
    library.with_suffix(".json").write_text(json.dumps(known), encoding="utf-8")


def _runs_on(libc: list[str]) -> bool:
    (name, needed), (mine, there) = libc, platform.libc_ver()
    return name == mine and _parts(there) >= _parts(needed)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _digest(include: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        content = (include / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
