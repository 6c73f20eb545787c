"""Compiling our tf.data operations against the headers inside the installed TensorFlow, once per version and user.

The library lies in a per-user cache under a name that says which TensorFlow, which ABI and which source it was made
from, so an upgrade of either compiles anew and two versions can be used side by side. Where a wheel has brought one
that was made from the same (`shipped.py`), nothing is compiled. A training does not wait for the compiler: it runs
beside it, in a process that gets only the CPU time and memory nobody else wants.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from intune_callbacks.errors import BuildFailed, MissingPackage
from intune_callbacks.pipelines.tf import shipped

__all__ = ["available", "begin", "build", "cache_folder", "check", "library_path", "ship"]

SOURCES = Path(__file__).parents[1] / "native"
# The compiler took 11 s (docs/adr/0020-no-fit-waits-for-a-compiler.md), beside a training many times that. A choice.
LOCK_WAIT_S, COMPILE_WAIT_S, POLL_S = 600.0, 900.0, 0.2
OPTIONS = ("-O2", "-DNDEBUG", "-shared", "-fPIC", "-w")
# Of what a failed compiler wrote. A choice: the first error and where it is.
LAST_LINES = 12
TRUSTED = (0,)
"""Users besides this one whose libraries are loaded: root installs them for all."""


def available() -> bool:
    """Say whether `build` has what it needs: TensorFlow, and a library compiled before or a compiler."""
    try:
        return library_path().exists() or _compiler() is not None
    except MissingPackage:
        return False


def cache_folder() -> Path:
    """The folder of compiled libraries: ``$INTUNE_CACHE``, or ``intune_callbacks`` in the user's cache folder."""
    given = os.environ.get("INTUNE_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "intune_callbacks"
    except RuntimeError:  # neither $HOME nor an entry for this user
        return Path(tempfile.gettempdir()) / f"intune_callbacks-{os.getuid()}"


def library_path() -> Path:
    """Where the library for the installed TensorFlow is, or will be.

    Raises:
        MissingPackage: TensorFlow is not installed.
    """
    path, (version, flags) = _own_path(), _tensorflow()
    found = None if path.exists() else shipped.find(shipped.FOLDER, version, _include(flags), _made_from(flags))
    return path if found is None else found


def _own_path() -> Path:
    version, flags = _tensorflow()
    abi = "".join(flag[-1] for flag in flags if flag.startswith("-D_GLIBCXX_USE_CXX11_ABI="))
    # A home may be shared by machines of several kinds.
    made_from = _made_from(flags, *platform.libc_ver())
    return cache_folder() / f"tfdata-{version}-abi{abi}-{made_from[:16]}.so"


def _made_from(flags: list[str], *machine: str) -> str:
    """Return a digest of all that a library is made from but TensorFlow's headers."""
    told = [flag for flag in flags if not flag.startswith(("-I", "-L"))]  # no folders, which are of this machine
    digest = hashlib.sha256("\n".join((*OPTIONS, *told, platform.machine(), *machine)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cc", ".h"):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _include(flags: list[str]) -> Path:
    return Path(next((flag[2:] for flag in flags if flag.startswith("-I")), "."))


def build(force: bool = False) -> Path:
    """Compile the operations if that has not been done for this TensorFlow and this source.

    Returns:
        The library's path.

    Raises:
        BuildFailed: there is no compiler, it failed, or another process kept the lock for ten minutes.
        MissingPackage: TensorFlow is not installed.
    """
    path = library_path()
    if path.exists() and not force:
        if path.parent != shipped.FOLDER:  # what came with this package is as safe as this package
            _check_owner(path)
        return path
    path = _own_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _failed(path).unlink(missing_ok=True)
        with _lock(path.with_suffix(".lock")):
            if force or not path.exists():
                _compile(path, *_tensorflow())
    except OSError as error:
        raise BuildFailed(f"cannot write to {path.parent}: {error}; name another folder in INTUNE_CACHE") from error
    return path


def ship() -> Path:
    """Compile the operations for the installed TensorFlow into this package, for a wheel to take them along.

    Raises:
        BuildFailed: there is no compiler, or it failed.
        MissingPackage: TensorFlow is not installed.
    """
    version, flags = _tensorflow()
    path = shipped.FOLDER / shipped.name_of(version, platform.machine())
    path.parent.mkdir(exist_ok=True)
    _compile(path, version, flags)
    asked = [flag for flag in flags if not flag.startswith(("-L", "-l"))]  # nothing is linked
    command = [*_compiler_for(version, path), "-M", *OPTIONS, str(SOURCES / "tfdata.cc"), *asked]
    read = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_WAIT_S, check=True).stdout
    headers = [Path(word) for word in read.replace("\\\n", " ").split()[1:]]
    shipped.note(path, _include(flags), headers, _made_from(flags))
    return path


def check() -> None:
    """See whether `begin` would have what it needs.

    Raises:
        BuildFailed: there is no compiler, the folder cannot be written, or it has failed before.
        MissingPackage: TensorFlow is not installed.
    """
    path, (version, _) = _own_path(), _tensorflow()
    with contextlib.suppress(FileNotFoundError):
        raise BuildFailed(f"{_failed(path).read_text(encoding='utf-8')}\n`intune build-tf` tries again")
    _compiler_for(version, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildFailed(f"cannot write to {path.parent}: {error}; name another folder in INTUNE_CACHE") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BuildFailed(f"cannot write to {path.parent}; name another folder in INTUNE_CACHE")


def begin() -> None:
    """Begin to compile in a process of its own that outlives this one, and return at once.

    It takes idle CPU time only, and is the first to go where memory is short (g++ takes some 900 MB for ten seconds).
    A failure is remembered beside the library until `build` is called.

    Raises:
        BuildFailed: as for `check`.
        MissingPackage: TensorFlow is not installed.
    """
    check()
    path, (version, flags) = _own_path(), _tensorflow()
    print(f"intune: compiling the tf.data operations for TensorFlow {version} beside this training", file=sys.stderr)
    # A shell between the two, that ends at once: nobody has to wait for the compiler's end.
    subprocess.run(
        ["sh", "-c", '"$@" &', "sh", sys.executable, "-m", __name__, str(path.absolute()), version, *flags],
        cwd=Path(__file__).parents[3],  # where the package is found, installed or not
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


def _beside(path: Path, version: str, flags: list[str]) -> None:
    """What the process of `begin` does."""
    os.nice(19)
    with contextlib.suppress(OSError, AttributeError):  # not all containers allow it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        with _lock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(path, version, flags)
    except (BuildFailed, OSError) as error:
        (partial := path.with_suffix(f".{os.getpid()}")).write_text(str(error), encoding="utf-8")
        partial.replace(_failed(path))  # which another training may read at any moment


def _failed(path: Path) -> Path:
    return path.with_suffix(".failed")


def _check_owner(path: Path) -> None:
    """What is loaded runs as this user: nobody else may have written it."""
    for place in (path, path.parent):
        seen = place.stat()
        if seen.st_uid not in (*TRUSTED, os.getuid()):
            raise BuildFailed(f"{place} belongs to user {seen.st_uid}; name a folder of your own in INTUNE_CACHE")
        if seen.st_mode & stat.S_IWOTH and not seen.st_mode & stat.S_ISVTX:
            raise BuildFailed(f"anybody may write to {place}; run chmod o-w {place}, or name another in INTUNE_CACHE")


def _compile(path: Path, version: str, flags: list[str]) -> None:
    compiler = _compiler_for(version, path)
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    try:
        made = folder / path.name
        command = [*compiler, *OPTIONS, "-o", str(made), str(SOURCES / "tfdata.cc"), *flags]
        print(
            f"intune: compiling the tf.data operations for TensorFlow {version} (once, some ten seconds) ...",
            file=sys.stderr,
            flush=True,
        )
        began_s = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_WAIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildFailed(f"{command[0]} was not done after {COMPILE_WAIT_S:.0f} s and was stopped") from error
        if done.returncode:
            # The first error is the cause, the rest follows from it.
            words = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildFailed(
                f"{command[0]} failed for TensorFlow {version} with exit code {done.returncode}:\n"
                + "\n".join(words[:LAST_LINES])
                + f"\nthe command was: {' '.join(command)}"
            )
        os.replace(made, path)
        print(f"intune: compiled in {time.monotonic() - began_s:.0f} s: {path}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tensorflow() -> tuple[str, list[str]]:
    """The installed TensorFlow's version and the flags it wants operations to be compiled and linked with."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingPackage("tensorflow", "tensorflow")
    import tensorflow as tf

    return str(tf.__version__), [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]


def _compiler_for(version: str, path: Path) -> list[str]:
    found = _compiler()
    if found is None:
        raise BuildFailed(
            "no C++ compiler found (looked for $CXX, g++ and c++): install one (apt install g++), or copy the library "
            f"that `intune build-tf` makes on a machine with TensorFlow {version} to {path}"
        )
    return found


def _compiler() -> list[str] | None:
    for words in (os.environ.get("CXX", "").split(), ["g++"], ["c++"]):
        if words and shutil.which(words[0]):
            return words
    return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock against other processes; the system gives it back if this one dies."""
    import fcntl

    with path.open("a") as file:
        until_s = time.monotonic() + LOCK_WAIT_S
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise BuildFailed(
                        f"another process has been compiling for {LOCK_WAIT_S:.0f} s; end it, or remove {path}"
                    ) from None
            if not said:
                print("intune: waiting for another process that compiles ...", file=sys.stderr, flush=True)
                said = True
            time.sleep(POLL_S)
        yield


if __name__ == "__main__":
    _beside(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
