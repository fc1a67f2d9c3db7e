#!/usr/bin/env python3
"""Prepare ``.venv``: called by every Makefile target, instant if nothing changed.

Standard library only. Without a GPU it installs ``requirements/cpu.txt``, the leanest set with which the real engines
run. With one it installs the project the ordinary way (``pip install -e .[dev]``). A stamp in ``.venv`` (a hash of the
input files) lets the next run skip everything.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "cpu.txt"
TORCHVISION_FIX = ROOT / "tools" / "torchvision_fix.py"
OLDEST = (3, 11)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="Where the environment is or will be.")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="Which set to install.")
    options = parser.parse_args()
    device = options.device if options.device != "auto" else find_device()
    stamp = options.venv / "slime-setup.stamp"
    wanted = fingerprint(device)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    options.venv.mkdir(parents=True, exist_ok=True)
    with (options.venv / "slime-setup.lock").open("w", encoding="utf-8") as lock:
        try:
            # Two pip processes in one environment damage it. The kernel releases the lock when a process dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return fail(f"another set-up of {options.venv} is running; wait for it and try again")
        started = time.monotonic()
        python = create_venv(options.venv)
        for title, arguments in steps(device):
            pip(python, title, arguments)
        repair_torchvision(python)
        compile_bytecode(python)
        # Last: an interrupted set-up has no stamp and is repeated.
        stamp.write_text(wanted, encoding="utf-8")
        say(
            f"ready in {time.monotonic() - started:.0f} s: {options.venv} ({device} set) takes "
            f"{disk_bytes(options.venv) / 1e9:.1f} GB on disk"
        )
    return 0


def find_device() -> str:
    """``gpu`` where an NVIDIA driver is loaded. ``SLIME_ACCELERATOR=cpu`` overrides it, as it does at run time."""
    forced = os.environ.get("SLIME_ACCELERATOR")
    if forced:
        return "cpu" if forced == "cpu" else "gpu"
    return "gpu" if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() else "cpu"


def fingerprint(device: str) -> str:
    digest = hashlib.sha256(device.encode())
    for path in (ROOT / "pyproject.toml", ROOT / "requirements.txt", REQUIREMENTS, TORCHVISION_FIX, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(str(ROOT).encode())  # the editable install points here
    return digest.hexdigest() + "\n"


def create_venv(venv: Path) -> Path:
    python = venv / "bin" / "python"
    if not python.exists():
        base = base_python()
        say(f"creating {venv} with {base}")
        done = subprocess.run([base, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
        if done.returncode:
            # A half-made environment has a python and would pass for a whole one at the next call.
            shutil.rmtree(venv, ignore_errors=True)
            sys.exit(fail(f"`{base} -m venv` failed:\n{done.stdout}{done.stderr}"))
    return python


def base_python() -> str:
    """This interpreter if it is new enough, else the newest ``python3.N`` on PATH that is."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in (13, 12, 11):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    sys.exit(fail(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=..."))


def steps(device: str) -> list[tuple[str, list[str]]]:
    """(title, arguments of ``pip install``) in order."""
    if device == "gpu":
        return [("slime, with everything the engines can use on a GPU", ["-e", f"{ROOT}[dev]"])]
    result: list[tuple[str, list[str]]] = []
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#: step "):
            title = line.removeprefix("#: step ")
            # These packages declare GPU libraries as dependencies, which the CPU set leaves out.
            result.append((title, ["--no-deps"] if title == "no-deps" else []))
        elif line.strip() and not line.startswith("#"):
            result[-1][1].append(line.strip())
    # Steps without a reason to be apart go to pip together: it then solves for them once.
    merged = [argument for _, arguments in result[2:-1] for argument in arguments]
    own = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    return [*result[:2], ("what they import, and tools", merged), ("optional", result[-1][1]), ("slime", own)]


def pip(python: Path, title: str, arguments: list[str]) -> None:
    say(f"installing {title}")
    # compile_bytecode() uses all cores, pip one.
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    # Its output is for failures only: it would warn about the GPU libraries of SGLang that are left out on purpose.
    done = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode and title == "optional":
        say(f"without {' '.join(arguments)}: {(done.stdout.splitlines() or ['pip has no message'])[-1]}")
    elif done.returncode:
        sys.exit(fail(f"pip could not install {title} (exit code {done.returncode}):\n{done.stdout}"))


def repair_torchvision(python: Path) -> None:
    """Repair the index's torchvision, which does not fit a CPU-only torch, with ``torchvision_fix.py``."""
    # A subprocess: this interpreter may be another one than the environment's.
    if can_import(python, "torchvision"):
        return
    say("adding the repair of torchvision for a CPU-only torch")
    where = site_packages(python)
    shutil.copyfile(TORCHVISION_FIX, where / "_slime_torchvision_fix.py")
    (where / "_slime_torchvision_fix.pth").write_text("import _slime_torchvision_fix\n", encoding="utf-8")
    if not can_import(python, "torchvision"):
        sys.exit(fail("torchvision cannot be imported beside this torch; remove .venv and run again"))


def can_import(python: Path, module: str) -> bool:
    return not subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False).returncode


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def compile_bytecode(python: Path) -> None:
    """Write the .pyc files, also where PYTHONDONTWRITEBYTECODE is set: without them an engine starts 3 times slower."""
    say("compiling byte code")
    # Packages ship a few files in the Python of tomorrow or yesterday: their failures are theirs and harmless.
    command = [str(python), "-m", "compileall", "-q", "-j", "0", str(site_packages(python)), str(ROOT / "slime")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def disk_bytes(folder: Path) -> int:
    return sum(
        # st_blocks counts units of 512 bytes whatever the file system's block size is.
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def say(text: str) -> None:
    print(f"[set-up] {text}", flush=True)


def fail(text: str) -> int:
    print(f"[set-up] error: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
