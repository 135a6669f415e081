"""Ways to start and to end a process that embeds kvrelay: no crash, no hang, the stated exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kvrelay
import pytest
from cpp_building import ROOT, environment
from kvrelay.boxcache import cache_directory

LIMIT = 60  # seconds for a process that takes two: more is a hang

# What a shell shows as 128 + n is -n here: the process was ended by that signal.
EXIT_CODES = {
    "return": 0,
    "return with globals": 3,
    "return after shutdown": 0,
    "return while detached threads generate": 5,
    "exit while detached threads generate": 6,
    "exit on another thread while main generates": 7,
    "exit in a callback": 8,
    "exit while progress is told": 9,
    "exit while a callback sleeps": 10,
    "exit while a callback throws": 11,
    "exception out of main": -signal.SIGABRT,
    "quick_exit": 12,
    "a forked child exits": 13,
    "a forked child uses and destroys": 14,
    "interrupt handled by the host": 130,
    "interrupt not handled": -signal.SIGINT,
    "keeps SIGINT as it was": 0,
    "keeps SIGINT ignored": 0,
    "keeps the host's SIGINT": 0,
    "keeps the locale": 0,
    "starts on a thread that ends": 0,
    "starts on many threads at once": 0,
}


def run(
    programs: Path, way: str, bundle: Path | str, *arguments: str, expected: int = 0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run one way to its end."""
    options.setdefault("env", environment())
    # A shell's background jobs, these tests among them, begin with SIGINT ignored.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    done = subprocess.run(
        [str(programs / "paths"), way, str(bundle), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == expected, f"{way}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("way", EXIT_CODES)
def test_the_process_ends_with_the_stated_code(programs: Path, cpp_bundle: Path, warm: None, way: str) -> None:
    done = run(programs, way, cpp_bundle, expected=EXIT_CODES[way])
    wanted = "terminate called after throwing" if way == "exception out of main" else ""
    assert done.stderr.startswith(wanted)
    assert wanted or not done.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [way for way in EXIT_CODES if "exit" in way or "while" in way or "return" in way])
def test_the_process_ends_with_the_stated_code_fifty_times(
    programs: Path, cpp_bundle: Path, warm: None, way: str
) -> None:
    for _ in range(50):
        run(programs, way, cpp_bundle, expected=EXIT_CODES[way])


@pytest.fixture(scope="module")
def warm(programs: Path, cpp_bundle: Path) -> None:
    """Measure on first use before anything is timed by a limit."""
    subprocess.run(
        [str(programs / "paths"), "return with globals", str(cpp_bundle)], env=environment(), check=False, timeout=120
    )


def test_another_working_directory_is_neither_searched_nor_needed(
    programs: Path, cpp_bundle: Path, warm: None, tmp_path: Path
) -> None:
    for name in ("kvrelay.py", "numpy.py", "os.py", "_signal.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    run(programs, "starts anywhere", cpp_bundle, cwd=tmp_path)
    run(programs, "starts anywhere", os.path.relpath(cpp_bundle, tmp_path), cwd=tmp_path)


def test_python_variables_and_the_user_site_are_ignored(
    programs: Path, cpp_bundle: Path, warm: None, tmp_path: Path
) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / ".local" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "numpy.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong module')")
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path), "PYTHONSTARTUP": "x", "HOME": str(tmp_path)}
    run(programs, "starts anywhere", cpp_bundle, env=environment(**variables))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "no_such_LOCALE"])
def test_a_bundle_with_a_space_and_accents_in_its_path_is_found_in_any_locale(
    programs: Path, cpp_bundle: Path, warm: None, tmp_path: Path, locale: str
) -> None:
    bundle = shutil.copytree(cpp_bundle, tmp_path / "modèle de 試験 e\u0301")
    run(programs, "starts anywhere", bundle, env=environment(LC_ALL=locale, LANG=locale))


def test_standard_streams_may_be_closed(programs: Path, cpp_bundle: Path, warm: None) -> None:
    command = f"exec '{programs / 'paths'}' 'starts anywhere' '{cpp_bundle}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], env=environment(), check=False, timeout=LIMIT).returncode == 0


def test_an_environment_is_chosen_at_run_time_or_refused(
    programs: Path, cpp_bundle: Path, warm: None, tmp_path: Path
) -> None:
    way = "starts in an environment"
    run(programs, way, cpp_bundle, sys.prefix)
    done = run(programs, way, cpp_bundle, str(tmp_path), expected=98)
    assert f"no Python environment at {tmp_path}: it has no bin/python3" in done.stderr
    for name in ("", "x" * 5000):
        assert "no Python environment at" in run(programs, way, cpp_bundle, name, expected=98).stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    done = run(programs, way, cpp_bundle, str(tmp_path), expected=98)
    assert "an environment of another Python: this program is linked with python3." in done.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True, timeout=60)
    done = run(programs, way, cpp_bundle, str(tmp_path / "empty"), expected=98)
    assert "cannot import kvrelay there (ModuleNotFoundError: No module named 'kvrelay'): install it" in done.stderr


def test_a_read_only_file_system_needs_one_writable_folder(
    programs: Path, cpp_bundle: Path, warm: None, box: Path, tmp_path: Path
) -> None:
    """All that is written is the box's cache; without a place for it the error names the way out."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a read-only file system")
    cache = shutil.copytree(box, tmp_path / "cache")
    script = (
        f"mount -t tmpfs none '{tmp_path / 'writable'}' && cp -r '{cache}'/. '{tmp_path / 'writable'}' && "
        f"mount -o remount,ro,bind / 2>/dev/null || mount --bind / / && mount -o remount,ro,bind / ; "
        f"touch '{tmp_path}/x' 2>/dev/null && exit 77; "
        f"exec '{programs / 'paths'}' 'starts anywhere' '{cpp_bundle}'"
    )
    (tmp_path / "writable").mkdir()
    for folder, expected in ((tmp_path / "writable", 0), (tmp_path / "missing", 98)):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env=environment(KVRELAY_CACHE=str(folder)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode == 77:
            pytest.skip("the file system stays writable")
        assert done.returncode == expected, done.stderr
        assert expected == 0 or "set KVRELAY_CACHE to a writable folder" in done.stderr


def test_a_user_without_a_home_needs_none(cpp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = shutil.copytree(cpp_bundle, tmp_path / "bundle")
    for name in ("KVRELAY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    assert cache_directory(bundle).is_relative_to(tmp_path / "kvrelay-cache")
    shutil.rmtree(tmp_path / "kvrelay-cache")
    (tmp_path / "kvrelay-cache").write_text("in the way")
    with pytest.raises(kvrelay.CacheDirectoryError, match="set KVRELAY_CACHE"):
        cache_directory(bundle)


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_plugin_works_in_a_host_without_python(programs: Path, cpp_bundle: Path, warm: None) -> None:
    command = [str(programs / "plugin_host"), str(programs / "libplugin.so"), str(cpp_bundle)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_a_host_may_run_an_interpreter_of_its_own_and_end_it(programs: Path, cpp_bundle: Path, warm: None) -> None:
    command = [str(programs / "python_host"), str(programs / "libplugin.so"), str(cpp_bundle), sys.prefix]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("the host finalised the interpreter") == 2


@pytest.mark.parametrize("gil", ["held", "free"])
def test_a_python_program_may_be_the_host(programs: Path, cpp_bundle: Path, warm: None, gil: str) -> None:
    script = ROOT / "tests" / "cpp" / "plugin_in_python.py"
    command = [sys.executable, str(script), str(programs / "libplugin.so"), str(cpp_bundle), gil]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
