"""Compiling the tf.data operations: the cache's key, the lock, what is said when it does not work."""

from __future__ import annotations

import fcntl
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from intune_callbacks import cli
from intune_callbacks.errors import BuildFailed, MissingPackage
from intune_callbacks.pipelines.tf import build as tf_build
from intune_callbacks.pipelines.tf import shipped as tf_shipped


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("tensorflow")
    monkeypatch.setenv("INTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tf_shipped, "FOLDER", tmp_path / "built")
    return tmp_path / "cache"


def test_without_tensorflow_it_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_build.importlib.util, "find_spec", lambda name: None)
    assert not tf_build.available()
    with pytest.raises(MissingPackage, match=r"python -m pip install 'tensorflow>=2"):
        tf_build.build()


def test_the_name_says_what_it_was_made_from(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    before = tf_build.library_path()
    assert before.parent == cache
    assert f"-{tf.__version__}-abi" in before.name
    changed = tmp_path / "native"
    changed.mkdir()
    for source in tf_build.SOURCES.iterdir():
        (changed / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(tf_build, "SOURCES", changed)
    assert tf_build.library_path() != before


def test_a_library_that_is_there_is_taken_without_a_word(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    tf_build.library_path().write_bytes(b"made before")
    assert tf_build.available()
    assert cli.main(["build-tf"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tf_build.library_path()}\n"
    assert "compiling" not in printed.err


def test_the_compilers_words_are_passed_on(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tf_build._compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("CXX", "g++ -include no_such_header.h")
    with pytest.raises(BuildFailed, match=r"(?s)error: no_such_header.h.*the command was: g\+\+"):
        tf_build.build()
    assert not list(cache.glob("build-*"))
    assert cli.main(["build-tf"]) == 2
    assert "no_such_header.h" in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not tf_build.available()
    with pytest.raises(BuildFailed, match="apt install g\\+\\+"):
        tf_build.build()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildFailed, match="name another folder in INTUNE_CACHE"):
        tf_build.build()


def test_the_wait_for_another_process_is_bounded(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf_build, "LOCK_WAIT_S", 0.3)
    cache.mkdir()
    lock = tf_build.library_path().with_suffix(".lock")
    with lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BuildFailed, match=f"remove {lock}"):
            tf_build.build()
    assert "waiting for another process" in capsys.readouterr().err


def test_two_at_once_compile_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler here only writes a word, late: what counts is how often it is called."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\necho called >> "$0.log"\nsleep 1\nwhile [ "$1" != "-o" ]; do shift; done\necho made > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    # The lock belongs to the open file, so that two threads exclude each other as two processes do.
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: tf_build.build(), range(2)))
    assert paths == [tf_build.library_path()] * 2
    assert compiler.with_suffix(".log").read_text() == "called\n"
    assert paths[0].read_text() == "made\n"
    assert tf_build.build(force=True) == paths[0]
    assert compiler.with_suffix(".log").read_text() == "called\n" * 2
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == []


def test_another_machine_needs_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tf_build.library_path()
    monkeypatch.setattr(tf_build.platform, "machine", lambda: "riscv64")
    assert tf_build.library_path() != before


@pytest.mark.parametrize("place", ["folder", "file"])
def test_what_others_may_have_written_is_not_loaded(cache: Path, place: str) -> None:
    cache.mkdir()
    library = tf_build.library_path()
    library.write_bytes(b"somebody's code")
    (cache if place == "folder" else library).chmod(0o777)
    with pytest.raises(BuildFailed, match=r"anybody may write to .*; run chmod o-w"):
        tf_build.build()


def test_what_belongs_to_another_user_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    tf_build.library_path().write_bytes(b"somebody's code")
    monkeypatch.setattr(tf_build.os, "getuid", lambda: 12345)
    if cache.stat().st_uid == 0:
        monkeypatch.setattr(tf_build, "TRUSTED", ())
    with pytest.raises(BuildFailed, match=r"belongs to user \d+; name a folder of your own in INTUNE_CACHE"):
        tf_build.build()


def test_a_library_that_does_not_load_is_compiled_anew_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from intune_callbacks.pipelines.tf import native as tf_native

    asked: list[bool] = []
    monkeypatch.setattr(tf_build, "build", lambda force=False: asked.append(force) or Path("/no/such.so"))
    with pytest.raises(BuildFailed, match="was compiled but does not load"):
        tf_native.load.__wrapped__()
    assert asked == [False, True]


def _soon(there: Path) -> None:
    until_s = time.monotonic() + 60.0
    while not there.exists():
        assert time.monotonic() < until_s, there
        time.sleep(0.02)


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_nobody_waits_for_a_compiler_that_runs_beside(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, told = tmp_path / "leave", tmp_path / "told"
    compiler = (
        f'while [ ! -e "{leave}" ]; do sleep 0.05; done; nice > "{told}"; cat /proc/self/oom_score_adj >> "{told}"'
    )
    compiler += '; while [ "$1" != "-o" ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("CXX", _script(tmp_path / "compiler", compiler))
    tf_build.begin()
    assert not tf_build.library_path().exists()
    leave.touch()
    _soon(tf_build.library_path())
    assert tf_build.library_path().read_text() == "made\n"
    assert told.read_text() == "19\n1000\n"
    assert tf_build.build() == tf_build.library_path()


def test_a_cache_named_relative_to_the_training_is_found_from_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTUNE_CACHE", "cache")
    makes = 'while [ "$1" != "-o" ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("CXX", _script(tmp_path / "compiler", makes))
    tf_build.begin()
    _soon(tf_build.library_path())
    assert (tmp_path / "cache").is_dir()


def test_a_compiler_that_failed_beside_is_not_called_again_until_it_is_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _script(tmp_path / "compiler", "echo 'error: no headers' >&2; exit 3"))
    tf_build.begin()
    failed = tf_build.library_path().with_suffix(".failed")
    _soon(failed)
    with pytest.raises(BuildFailed, match="error: no headers") as caught:
        tf_build.begin()
    assert "`intune build-tf` tries again" in str(caught.value)
    with pytest.raises(BuildFailed, match="exit code 3"):
        tf_build.build()
    assert not failed.exists()


HEADERS = ("tensorflow/core/framework/dataset.h", "tensorflow/core/framework/op_kernel.h")


@pytest.fixture
def shipped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for a library in the package, and neither a compiler nor another library."""
    version, flags = tf_build._tensorflow()
    tf_shipped.FOLDER.mkdir()
    library = tf_shipped.FOLDER / tf_shipped.name_of(version, "x86_64")
    library.write_bytes(b"made elsewhere")
    include = tf_build._include(flags)
    tf_shipped.note(library, include, [include / name for name in HEADERS], tf_build._made_from(flags))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    return library


def test_what_a_wheel_has_brought_needs_no_compiler(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tf_build.available()
    assert tf_build.build() == tf_build.library_path() == shipped
    assert cli.main(["build-tf"]) == 0
    assert capsys.readouterr().out == f"{shipped}\n"


def test_what_was_compiled_here_goes_first(cache: Path, shipped: Path) -> None:
    cache.mkdir()
    tf_build._own_path().write_bytes(b"made before")
    assert tf_build.library_path().parent == cache


@pytest.mark.parametrize(
    "change", ["header", "missing header", "source", "newer libc", "no library", "not JSON", "version"]
)
def test_what_was_made_from_something_else_is_left(
    change: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = shipped.with_suffix(".json")
    known = json.loads(noted.read_text())
    if change == "source":
        monkeypatch.setattr(tf_build, "OPTIONS", ("-O3",))
    elif change == "no library":
        shipped.unlink()
    elif change == "newer libc":
        noted.write_text(json.dumps(known | {"libc": ["glibc", "999.1"]}))
    elif change == "version":
        for file in (shipped, noted):
            file.rename(file.with_name(f"tfdata-1.9.0-x86_64{file.suffix}"))
    else:
        known["headers"] += ["no/such.h"] * (change == "missing header")
        known["digest"] = known["digest"] if change == "missing header" else "0"
        noted.write_text("{" if change == "not JSON" else json.dumps(known))
    assert not tf_build.available()
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler found"):
        tf_build.build()


def test_a_library_for_a_wheel_knows_its_headers(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler here names headers where it is asked for them, and else writes a word."""
    include = tf_build._include(tf_build._tensorflow()[1])
    names = " ".join(f"{include}/{name}" for name in HEADERS)
    makes = 'while [ "$1" != "-o" ]; do shift; done; echo made > "$2"'
    words = f'case "$*" in *" -M "*|"-M "*) echo "tfdata.o: tfdata.cc /usr/include/vector {names}";; *) {makes};; esac'
    monkeypatch.setenv("CXX", _script(tmp_path / "compiler", words))
    assert cli.main(["build-tf", "--ship"]) == 0
    library = Path(capsys.readouterr().out.strip())
    assert library.parent == tf_shipped.FOLDER and library.read_text() == "made\n"
    assert json.loads(library.with_suffix(".json").read_text())["headers"] == sorted(HEADERS)
