"""Long commands in a sandbox: run once, waited for, within a budget. Also the E2B client's retries."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.agent import docker_sandbox, sandbox
from slime.agent.docker_sandbox import DockerSandbox
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, E2BSandbox, Sandbox, ensure_agent_user, exec_and_wait
from slime.environments import shell_tool
from slime.utils.errors import DeadlineExceeded


class ThisMachine:
    """Runs commands as the user of the tests."""

    sandbox_id = "here"

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        pass

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.commands.append(cmd)
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", cmd], capture_output=True, text=True, timeout=timeout, env=env
        )
        assert not check or done.returncode == 0, done.stderr
        return done.returncode, done.stdout, done.stderr

    async def write_file(self, path, content, *, user="root"):
        with open(path, "w") as file:
            file.write(content)

    async def read_file(self, path, *, user="root"):
        with open(path) as file:
            return file.read()


@pytest.fixture
def here(monkeypatch):
    """Polls every 50 ms, whatever the code says."""
    pause = asyncio.sleep
    monkeypatch.setattr(sandbox, "asyncio", SimpleNamespace(sleep=lambda seconds: pause(0.05)))
    return ThisMachine()


def wait(sb, cmd, budget=100, **values):
    tag = f"test-{uuid.uuid4().hex}"
    try:
        return asyncio.run(exec_and_wait(sb, cmd=cmd, time_budget_sec=budget, tag=tag, **values))
    finally:
        subprocess.run(f"rm -rf /tmp/.{tag}.*", shell=True, check=True)


def test_a_stand_in_is_a_sandbox(here):
    assert isinstance(here, Sandbox)
    assert isinstance(E2BSandbox("image"), Sandbox)


def test_success_is_silent_unless_the_output_is_wanted(here):
    assert wait(here, "echo hello") == (0, "")
    assert wait(here, "echo hello; echo more >&2", want_output=True) == (0, "hello\nmore\n")


def test_a_failure_brings_the_end_of_its_output_and_its_code(here):
    code, tail = wait(here, "seq 1000; exit 7")
    assert (code, len(tail)) == (7, 512)
    assert tail.endswith("1000\n")


def test_place_environment_and_output_file_are_as_asked(here, tmp_path):
    out = tmp_path / "out file"
    code, text = wait(
        here,
        "pwd; echo $HOME $NAME",
        workdir=str(tmp_path),
        env={"NAME": "x", "PATH": "/usr/bin:/bin"},
        out_file=str(out),
        want_output=True,
        user="agent",
    )
    assert (code, text) == (0, f"{tmp_path}\n/home/agent x\n")
    assert out.read_text() == text


def test_a_command_that_takes_too_long_is_left_with_its_output(here, tmp_path):
    plain, out = here.exec, tmp_path / "out"

    async def once_it_has_begun(cmd, **values):  # on a slow machine the budget ends before the first line
        while cmd.startswith("tail") and not out.read_text():
            await asyncio.sleep(0.05)
        return await plain(cmd, **values)

    here.exec = once_it_has_begun
    code, tail = wait(here, "echo begun; sleep 60", budget=10, out_file=str(out))
    assert (code, tail) == (EXIT_TIME_BUDGET_EXCEEDED, "begun\n")


def test_a_spawn_that_is_sent_twice_runs_once_and_a_new_run_is_not_skipped(here, tmp_path):
    plain = here.exec

    async def twice(cmd, **values):
        if "setsid" in cmd:
            await plain(cmd, **values)
        return await plain(cmd, **values)

    here.exec = twice
    log = tmp_path / "log"
    assert wait(here, f"echo ran >> {log}")[0] == 0
    assert log.read_text() == "ran\n"
    tag = f"test-{uuid.uuid4().hex}"
    for _ in range(2):
        asyncio.run(exec_and_wait(here, cmd=f"echo again >> {log}", time_budget_sec=50, tag=tag))
    subprocess.run(f"rm -rf /tmp/.{tag}.*", shell=True, check=True)
    assert log.read_text() == "ran\nagain\nagain\n"


def test_the_agents_user_owns_its_place():
    seen = []

    class Recorder(ThisMachine):
        async def exec(self, cmd, **values):
            seen.append((cmd, values))
            return 0, "", ""

    asyncio.run(ensure_agent_user(Recorder(), "/work dir"))
    assert "useradd -m -s /bin/bash agent" in seen[0][0]
    assert "chown -R agent:agent /home/agent '/work dir'" in seen[0][0]
    assert seen[1] == ("id agent", {"check": True, "timeout": 60})


class ConnectError(Exception):
    pass


class SandboxException(Exception):
    pass


class CommandExit(Exception):
    exit_code, stdout, stderr = 3, "out", "err"


class Remote:
    """A fake of ``e2b.AsyncSandbox`` with errors that come first."""

    sandbox_id = "remote"

    def __init__(self, errors):
        self.errors, self.calls, self.killed = list(errors), 0, False
        self.commands = SimpleNamespace(run=self.answer)
        self.files = SimpleNamespace(write=self.answer, read=self.answer)

    async def answer(self, *args, **values):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return SimpleNamespace(exit_code=0, stdout="out", stderr="")

    async def kill(self):
        self.killed = True


@pytest.fixture
def remote(monkeypatch):
    async def no_pause(seconds):
        assert seconds <= 32

    monkeypatch.setattr(sandbox.asyncio, "sleep", no_pause)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "vendor/image")
    made = []

    def enter(errors):
        async def create(**values):
            made.append(values)
            return Remote(errors)

        monkeypatch.setitem(sys.modules, "e2b", SimpleNamespace(AsyncSandbox=SimpleNamespace(create=create)))
        return asyncio.run(E2BSandbox("img", timeout=9).__aenter__())

    enter.made = made
    return enter


def test_the_service_is_told_image_size_and_lifetime(remote, monkeypatch):
    sb = remote([])
    assert remote.made == [{"timeout": 9, "metadata": {"vendor/image": "img", "vendor/size": "md"}}]
    assert sb.sandbox_id == "remote"
    inner = sb._sandbox
    asyncio.run(sb.__aexit__())
    assert inner.killed
    monkeypatch.delenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY")
    with pytest.raises(RuntimeError, match="IMAGE_METADATA_KEY"):
        asyncio.run(E2BSandbox("img").__aenter__())


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (ConnectError("x"), 2),
        (SandboxException("busy"), 2),
        (SandboxException("it does not exist"), 1),
        (ValueError("x"), 1),
    ],
)
def test_errors_of_the_connection_are_retried(remote, error, num_calls):
    sb = remote([error])
    if num_calls == 2:
        assert asyncio.run(sb.exec("true")) == (0, "out", "")
    else:
        with pytest.raises(type(error)):
            asyncio.run(sb.exec("true"))
    assert sb._sandbox.calls == num_calls


def test_what_may_not_run_twice_is_not_retried_and_retries_end(remote):
    sb = remote([ConnectError()])
    with pytest.raises(ConnectError):
        asyncio.run(sb.exec("true", idempotent=False))
    sb = remote([ConnectError() for _ in range(9)])
    with pytest.raises(ConnectError):
        asyncio.run(sb.exec("true"))
    assert sb._sandbox.calls == 7


def test_a_service_that_is_silent_is_not_waited_for_for_ever(remote, monkeypatch, caplog):
    async def forever(*args, **values):
        await asyncio.Event().wait()

    sb = remote([])
    monkeypatch.setattr(sandbox, "_CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(sandbox, "_CREATE_TIMEOUT_S", 0.05)
    sb._sandbox.files.write = sb._sandbox.kill = forever
    with pytest.raises(DeadlineExceeded, match=r"sandbox remote: the service did not answer in 0\.05 s"):
        asyncio.run(sb.write_file("/a", "b"))
    asyncio.run(sb.__aexit__())
    assert sb.sandbox_id == ""
    assert "it ends by itself 9 s after its start" in caplog.text
    monkeypatch.setitem(sys.modules, "e2b", SimpleNamespace(AsyncSandbox=SimpleNamespace(create=forever)))
    with pytest.raises(DeadlineExceeded, match=r"sandbox of img: the service did not answer in 0\.05 s"):
        asyncio.run(E2BSandbox("img").__aenter__())


def test_a_failed_command_is_a_result_or_an_error_and_a_missing_file_an_error(remote):
    assert asyncio.run(remote([CommandExit()]).exec("false")) == (3, "out", "err")
    with pytest.raises(RuntimeError, match="ended with 3: err"):
        asyncio.run(remote([CommandExit()]).exec("false", check=True))
    with pytest.raises(FileNotFoundError, match="/gone"):
        asyncio.run(remote([ValueError("no file")]).read_file("/gone"))


@pytest.fixture
def docker(tmp_path):
    """A program that runs its arguments on this machine and records how it was called."""
    program = tmp_path / "docker"
    program.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> {tmp_path}/calls\n'
        'case "$1" in run) echo pulling; echo c0ffee; [[ "$*" != *missing* ]];;\n'
        '  exec) while [[ "$1" != bash ]]; do shift; done; exec "$@";; esac\n'
    )
    program.chmod(0o755)
    return program


def test_a_container_runs_commands_keeps_files_and_is_removed(docker, tmp_path):
    async def use():
        async with DockerSandbox("img", command=str(docker), timeout=9, run_args=["--network=host"]) as sb:
            assert isinstance(sb, Sandbox)
            assert sb.sandbox_id == "c0ffee"
            assert await sb.exec("echo a; echo b >&2; exit 3", user="agent", env={"X": "1 2"}) == (3, "a\n", "b\n")
            assert await sb.exec('echo "$X"', env={"X": "1 2", "PATH": "/none"}) == (0, "1 2\n", "")
            with pytest.raises(RuntimeError, match="ended with 3"):
                await sb.exec("exit 3", check=True)
            for content in ("text", b"text", Path(__file__)):
                await sb.write_file(f"{tmp_path}/in/a b", content)
            assert await sb.read_file(f"{tmp_path}/in/a b") == Path(__file__).read_text()
            with pytest.raises(FileNotFoundError, match="gone"):
                await sb.read_file(f"{tmp_path}/gone")
            with pytest.raises(DeadlineExceeded, match=r"took more than 0\.2 s"):
                await sb.exec("exec sleep 30", timeout=0.2)

    asyncio.run(use())
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "run --detach --rm --init --network=host --entrypoint sleep img 9"
    assert calls[1].startswith("exec --user agent --env X c0ffee timeout -k 5 121 bash -c echo a")
    assert calls[2].startswith("exec --user root --env X --env PATH=/none c0ffee timeout -k 5 121 bash -c echo")
    assert not any("1 2" in call for call in calls), "values are not for everybody to read"
    assert calls[-1] == "rm --force c0ffee"


def test_a_container_that_does_not_start_is_an_error(docker):
    with pytest.raises(RuntimeError, match="run missing ended with 1"):
        asyncio.run(DockerSandbox("missing", command=str(docker)).__aenter__())


def test_a_command_in_a_container_ends_with_the_wait_for_it_and_may_not_fill_our_memory(docker, tmp_path, monkeypatch):
    monkeypatch.setattr(docker_sandbox, "_MOST_BYTES", 1000)

    async def use():
        sb = DockerSandbox("img", command=str(docker))
        with pytest.raises(DeadlineExceeded):
            await sb.exec("exec sleep 30", timeout=0.2)
        with pytest.raises(RuntimeError, match="wrote more than 0 MiB"):
            await sb.exec("exec yes")

    asyncio.run(use())
    limits = [call.split("timeout")[1].split()[:3] for call in (tmp_path / "calls").read_text().splitlines()]
    assert limits == [["-k", "5", "1.2"], ["-k", "5", "121"]]


@pytest.mark.parametrize(
    ("command", "answer"),
    [("echo a\0b", "character 0"), ("echo " + "x" * 200_000, "131071 bytes"), ("yes", "more than 1 MiB")],
)
def test_a_command_that_cannot_run_is_an_answer_for_the_policy(tmp_path, monkeypatch, command, answer):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec yes\n")
    program.chmod(0o755)
    monkeypatch.setattr(docker_sandbox, "_MOST_BYTES", 1 << 20)
    _, call = shell_tool(DockerSandbox("image", command=str(program)), 60)
    assert answer in asyncio.run(call("run", {"command": command}))


class TimeoutException(SandboxException):
    """As in e2b, with its text for a command."""

    def __init__(self):
        super().__init__("context deadline exceeded: This error is likely due to exceeding 'timeout': the total time")


class NotFoundException(SandboxException):
    pass


class FileNotFoundException(NotFoundException):
    pass


def test_a_command_over_its_limit_is_not_run_again_and_is_an_answer_for_the_policy(remote):
    sb = remote([TimeoutException(), TimeoutException()])
    with pytest.raises(DeadlineExceeded):
        asyncio.run(sb.exec("sleep 9", timeout=1))
    assert sb._sandbox.calls == 1
    _, call = shell_tool(sb, 1)
    assert asyncio.run(call("run", {"command": "sleep 9"})) == "the command took more than 1 s"


def test_a_missing_file_is_not_asked_for_again(remote):
    sb = remote([FileNotFoundException("path '/a' not found")])
    with pytest.raises(FileNotFoundError):
        asyncio.run(sb.read_file("/a"))
    assert sb._sandbox.calls == 1
