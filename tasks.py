"""Every task of this repository, on any Python 3.11 or newer and pip; nothing else has to be installed.

::

    python3 tasks.py demo  [arguments of examples/train_gpt.py]
    python3 tasks.py test  [arguments of pytest]      checks, then tests
    python3 tasks.py check                            format, lint, types, import rules
    python3 tasks.py bench [arguments of benchmarks/run.py]
    python3 tasks.py lock                             resolve requirements.lock again

Each sets up ``.venv`` from ``requirements.lock`` first, unless it is there already and still fits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "locked"
UV = "uv==0.13.9"

CHECKS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["basedpyright", "--pythonpath", "{python}"],
    "imports": ["lint-imports", "--no-logo"],
}

# See tests/conftest.py for what runs beside what.
SIDE_BY_SIDE = ["-n", "2"]


def main(arguments: list[str]) -> int:
    """Run the task that the first argument names and return its exit code."""
    tasks = {"demo": demo, "test": test, "check": check, "bench": bench, "lock": lock}
    if not arguments or arguments[0] not in tasks:
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, *rest = arguments
    if rest and name in ("check", "lock"):
        return _fail(f"{name} takes no arguments, found: {' '.join(rest)}")
    return tasks[name](*rest)


def demo(*arguments: str) -> int:
    """Train through a dead worker and a dead node, and compare with the uninterrupted run."""
    prepare()
    return _run("python", "examples/train_gpt.py", *arguments)


def bench(*arguments: str) -> int:
    """Measure the memory tier."""
    prepare()
    return _run("python", "benchmarks/run.py", *arguments)


def check() -> int:
    """Run every static check, also after one has failed, so that one run shows all there is to mend."""
    prepare()
    return _report(_failed_checks())


def test(*arguments: str) -> int:
    """Run the static checks and the tests."""
    prepare()
    failed = _failed_checks()
    if code := _run("python", "-m", "pytest", *(arguments or SIDE_BY_SIDE)):
        failed.append(f"tests (exit code {code})")
    return _report(failed)


def lock() -> int:
    """Write requirements.lock anew from pyproject.toml: one version of each package for all Pythons, with hashes."""
    with tempfile.TemporaryDirectory() as scratch:
        _create(Path(scratch), _find_python())
        python = Path(scratch, "bin", "python")
        _quietly(str(python), "-m", "pip", "install", "--quiet", UV)
        # Index addresses differ between machines and have no place in a file that all share.
        options = (
            "--universal --python-version 3.11 --fork-strategy fewest --generate-hashes --no-emit-index-url --upgrade"
        )
        extras = "--no-header --extra examples --extra dev pyproject.toml --output-file requirements.lock"
        _quietly(str(Path(scratch, "bin", "uv")), "pip", "compile", *options.split(), *extras.split())
    return 0


def prepare() -> None:
    """Make ``.venv`` hold exactly what the lock names, and this package in editable form."""
    if STAMP.exists() and STAMP.read_text() == _stamp() and _works(VENV / "bin" / "python"):
        return
    print("Setting up .venv from requirements.lock (some minutes, once) ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    python = str(VENV / "bin" / "python")
    _create(VENV, _find_python())
    # Wheels only: a source distribution would run code, and pull in build tools, that no hash covers.
    _pip(python, "--require-hashes", "--only-binary", ":all:", "--requirement", str(LOCK))
    _pip(python, "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT))
    STAMP.write_text(_stamp())
    print(f"... done in {time.monotonic() - start:.0f} s.", file=sys.stderr, flush=True)


def _stamp() -> str:
    """What an environment was made from. A moved checkout is another one: the scripts in it name their old place."""
    return f"{hashlib.sha256(LOCK.read_bytes()).hexdigest()} {VENV}\n"


def _create(venv: Path, python: str) -> None:
    _quietly(python, "-m", "venv", "--clear", str(venv))


def _pip(python: str, *arguments: str) -> None:
    _quietly(python, "-m", "pip", "install", "--quiet", "--progress-bar", "off", *arguments)


def _find_python() -> str:
    """A Python that is new enough and can create environments: the running one if it is, else one on PATH."""
    names = ("python3.11", "python3.12", "python3.13")
    on_path = [str(Path(folder, name)) for name in names for folder in os.get_exec_path()]
    for candidate in (sys.executable, *on_path):
        if _works(candidate):
            return candidate
    raise SystemExit(_fail("needs Python 3.11 or newer with its venv and ensurepip modules; none was found on PATH."))


def _works(python: str | Path) -> bool:
    """Whether this is a usable Python. Names on PATH can be shims of absent versions, or lack ensurepip (Debian)."""
    if not shutil.which(str(python)):
        return False
    probe = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([str(python), "-c", probe], capture_output=True, check=False).returncode == 0


def _failed_checks() -> list[str]:
    return [name for name, command in CHECKS.items() if _run(*command)]


def _report(failed: list[str]) -> int:
    return _fail(f"failed: {', '.join(failed)}") if failed else 0


def _run(program: str, *arguments: str) -> int:
    """Run a program of the environment in the foreground, from the repository's root."""
    python = str(VENV / "bin" / "python")
    command = [str(VENV / "bin" / program), *(python if each == "{python}" else each for each in arguments)]
    with subprocess.Popen(command, cwd=ROOT, env=_environment()) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the program got it too, and may need time to stop its own processes
                continue


def _quietly(*command: str) -> None:
    """Run a set-up step whose output matters only if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(_fail(f"exit code {done.returncode} from: {' '.join(command)}"))


def _environment() -> dict[str, str]:
    """The caller's environment with ``.venv`` first, less what would make Python or pip look elsewhere."""
    dropped = {"PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_HASHES"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join([str(VENV / "bin"), *os.get_exec_path()])
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(VENV), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def _fail(message: str) -> int:
    print(f"tasks.py: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
