"""Generated code in the sandbox: what passes, what cannot pass, and attempts to get out."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from flyspec.errors import ConfigError
from flyspec_lab import sandbox
from flyspec_lab.sandbox import SandboxLimits, check_sandbox, run_tests
from flyspec_lab.sandbox.system_calls import DENIED, system_call_filter
from tests.lab.sandboxes import needs_bubblewrap

pytestmark = needs_bubblewrap
ROOT = Path(__file__).resolve().parents[2]
SHORT = SandboxLimits(wall_s=2)
ENDLESS = SandboxLimits(wall_s=120, cpu_s=1)


def run(program: str, tests: str = "", limits: SandboxLimits = SHORT) -> sandbox.Execution:
    return run_tests(textwrap.dedent(program), textwrap.dedent(tests), limits)


def detail(program: str, limits: SandboxLimits = SandboxLimits()) -> str:  # noqa: B008
    """Run a program that ends with an exception and return what it says."""
    execution = run(program, limits=limits)
    assert not execution.passed
    return execution.detail


def test_a_program_passes_if_and_only_if_its_tests_do() -> None:
    program = "import math\ndef area(r): return math.pi * r * r"
    assert run_tests(program, "assert round(area(1), 2) == 3.14").passed
    failed = run_tests(program, "assert area(1) == 4, 'not four'")
    assert (failed.passed, failed.detail) == (False, "AssertionError: not four")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("x = '''", "SyntaxError: unterminated triple-quoted string"),
        ("raise KeyError('a')", "KeyError: 'a'"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("exit()", "NameError"),
        ("import os; os._exit(0)", "ended before its tests did (exit status 0)"),
        ("import os; os.kill(os.getpid(), 9)", "was killed at its limit of CPU time or memory"),
        ("import os; os.execv('/python/bin/python', ['python', '-c', ''])", "ended before"),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E"),
        ("print('passed'); raise BaseException", "BaseException"),
        ("import atexit, os; atexit.register(os._exit, 0); 1 / 0", "ZeroDivisionError"),
        ("import threading, os; threading.Timer(0.1, os._exit, [0]).start()\nwhile 1: pass",
         "ended before"),
        ("raise Exception('\\x1b[31m\\n\\u202e' + 'x' * 9999)", "Exception: ?[31m"),
    ],
)  # fmt: skip
def test_what_cannot_pass_and_why(program: str, reason: str) -> None:
    said = detail(program)
    assert said.startswith(reason)
    assert said.isascii()
    assert said.isprintable()
    assert len(said) <= 400


EVERY_FD = "import os\nfor fd in range(64):\n  try: {}\n  except OSError: pass\nos._exit(0)"


@pytest.mark.parametrize(
    "attempt",
    [
        "os.write(fd, b'passed')",
        "os.write(fd, b'passed ' + bytes(64))",
        "os.write(fd, b'ready\\npassed')",
        "os.write(fd, b'passed ' + os.read(fd, 64).hex().encode())",
        "os.close(fd)",
    ],
)
def test_writing_into_the_result_channel_is_no_pass(attempt: str) -> None:
    assert not run(EVERY_FD.format(attempt), limits=SandboxLimits()).passed


def test_what_can_be_read_anywhere_written_everywhere_is_no_pass() -> None:
    program = """
        import os, stat
        found = []
        for fd in range(3, 64):
            try:
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.set_blocking(fd, False)
                    found.append(os.read(fd, 64))
            except OSError: pass
        assert [len(data) for data in found] == [32], found  # the challenge, but not the key
        for fd in range(3, 64):
            try: os.write(fd, b"passed " + found[0].hex().encode())
            except OSError: pass
        os._exit(0)
        """
    assert detail(program) == "ended before its tests did (exit status 0)"


def test_a_pass_is_none_if_anything_else_was_written() -> None:
    program = EVERY_FD.format("os.write(fd, b'passed')").replace("os._exit(0)", "")
    assert not run(program).passed


def test_copies_of_the_program_give_no_answer() -> None:
    assert run("import os\nos.fork()", limits=SandboxLimits()).passed
    assert not run("import os, time\nif os.fork(): time.sleep(1000)").passed


def test_functions_that_the_program_replaces_change_nothing() -> None:
    program = """
        import builtins, hashlib, os
        builtins.exec = builtins.compile = os.write = os.read = hashlib.blake2b = None
        """
    assert run(program, "assert 1 + 1 == 2", SandboxLimits()).passed
    assert not run(program, "assert 1 + 1 == 3", SandboxLimits()).passed


def test_files_outside_can_neither_be_read_nor_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    for path in (secret, __file__, "/etc/passwd", "/etc/shadow", Path.home(), ROOT, "/sys"):
        assert detail(f"import os; os.stat({str(path)!r})").startswith("FileNotFoundError")
    seen = detail("import os; raise Exception(sorted(os.listdir('/')))")
    assert "home" not in seen
    assert "proc" not in seen
    for path in ("/x", "/python/x", "/usr/lib/x", "/dev/x", "/inside.py", "/program.json"):
        said = detail(f"open({path!r}, 'w').write('x')")
        assert said.startswith(("OSError: [Errno 30]", "PermissionError"))
    name = f"/tmp/{tmp_path.name}-{os.getpid()}"
    assert run(f"open({name!r}, 'w').write('x')", limits=SandboxLimits()).passed
    assert not Path(name).exists()


def test_other_processes_are_out_of_sight() -> None:
    assert detail("import os; raise Exception(os.getpid())") == "Exception: 2"
    assert detail("open('/proc/self/environ')").startswith("FileNotFoundError")
    assert detail(f"import os; os.kill({os.getpid()}, 0)").startswith("ProcessLookupError")
    known = {"LD_LIBRARY_PATH", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}
    assert detail(f"import os; raise Exception(set(os.environ) - {known})") == "Exception: set()"


def test_it_is_nobody_without_rights() -> None:
    uid = int(detail("import os; raise Exception(os.getuid())").removeprefix("Exception: "))
    assert uid not in (0, os.getuid())
    assert detail("import os; os.setuid(0)").startswith("PermissionError")
    capabilities = """
        import ctypes, struct
        header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))  # version 3
        data = ctypes.create_string_buffer(24)
        ctypes.CDLL(None).capget(header, data)
        effective, permitted, _, *high = struct.unpack("6I", data.raw)
        raise Exception(effective, permitted, *high[:2])
        """
    assert detail(capabilities) == "Exception: (0, 0, 0, 0)"
    raised = "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (100, 100))"
    assert detail(raised).startswith(("ValueError", "PermissionError"))


def test_only_the_descriptors_of_the_protocol_are_open() -> None:
    program = """
        import os, stat
        def kind(fd):
            try: return stat.S_IFMT(os.fstat(fd).st_mode)
            except OSError: return None
        raise Exception([fd for fd in range(64) if kind(fd) not in (None, stat.S_IFCHR)])
        """
    assert detail(program) == "Exception: [10, 11]"


def test_no_network_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert detail(program).startswith("PermissionError")
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_VSOCK", "AF_NETLINK", "AF_PACKET"):
        program = f"import socket; socket.socket(socket.{family})"
        assert detail(program).startswith("PermissionError")


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("unshare", "0x10000000"),  # a user namespace, with all rights in it
        ("clone", "0x10000011, 0, 0, 0, 0"),
        ("setns", "0, 0"),
        ("mount", "0, 0, 0, 0, 0"),
        ("ptrace", "0, 0, 0, 0"),
        ("shmget", "0, 4096, 0o1600"),
        ("memfd_create", "b'x', 0"),
        ("keyctl", "0, 0, 0, 0, 0"),
        ("bpf", "0, 0, 0"),
    ],
)
def test_system_calls_that_no_program_needs_are_denied(call: str, arguments: str) -> None:
    _, clone, denied = DENIED[os.uname().machine]
    number = {**denied, "clone": clone}[call]
    program = f"""
        import ctypes, errno
        c = ctypes.CDLL(None, use_errno=True)
        done = c.syscall({number}, {arguments})
        raise Exception(done, errno.errorcode.get(ctypes.get_errno()))
        """
    assert detail(program) == "Exception: (-1, 'EPERM')"


def test_a_fork_bomb_is_contained() -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert not run(bomb).passed
    assert not running()
    count = """
        import os, time
        started = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(60)
                started += 1
        except OSError:
            raise Exception(started)
        """
    started = int(detail(count).removeprefix("Exception: "))
    assert started < SandboxLimits().num_processes
    assert not running()


def test_threads_count_as_processes() -> None:
    program = """
        import threading, time
        for i in range(100): threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        """
    assert detail(program).startswith("RuntimeError: can't start new thread")


@pytest.mark.parametrize(
    "hog",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append('x' * 1000000)",
        "import mmap\nx = [mmap.mmap(-1, 1 << 27) for i in range(100)]",
    ],
)
def test_memory_is_limited(hog: str) -> None:
    assert detail(hog).startswith(("MemoryError", "OSError"))


def test_files_are_limited() -> None:
    assert "limit of file size" in detail("""
        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        open('/tmp/x', 'wb').write(bytes(1 << 24))
        """)
    many = "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    assert detail(many).startswith("OSError: [Errno 28]")
    assert detail("x = [open('/tmp/x', 'w') for i in range(99)]").startswith("OSError: [Errno 24]")


def test_an_endless_loop_ends_at_its_limit_of_cpu_time() -> None:
    assert "CPU time" in detail("while True: pass", ENDLESS)
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert "CPU time" in detail(ignoring, ENDLESS)


def test_what_only_waits_and_ignores_every_signal_is_ended() -> None:
    program = """
        import os, signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        if os.fork() == 0: os.setsid()
        time.sleep(1000)
        """
    assert detail(program, SHORT) == "took more than 2 s"
    assert not running()


def test_endless_output_goes_nowhere() -> None:
    printing = "import sys\nwhile True: print('x' * 1000); print('x' * 1000, file=sys.stderr)"
    assert not run(printing, limits=ENDLESS).passed
    flood = EVERY_FD.format("os.write(fd, b'x' * 1000)").replace("for fd", "while 1:\n for fd")
    assert not run(flood.replace("\n  ", "\n    ").replace("\nos._exit(0)", "")).passed


def test_an_unprivileged_user_is_contained_as_well() -> None:
    """Runs this module's attempts again, as nobody, if root runs the tests."""
    if os.geteuid() != 0:
        pytest.skip("already run by an unprivileged user")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    setpriv = shutil.which("setpriv")
    if python is None or setpriv is None:
        pytest.skip("needs /usr/bin/python3 and setpriv to become an unprivileged user")
    program = textwrap.dedent("""
        import sys
        if sys.version_info < (3, 11): sys.exit(77)
        try: from flyspec_lab.sandbox import SandboxLimits, run_tests
        except PermissionError: sys.exit(77)
        limits = SandboxLimits(wall_s=2)
        def said(program):
            done = run_tests(program, "", limits)
            assert not done.passed, program
            return done.detail
        assert run_tests("def f(): return 1", "assert f() == 1").passed
        assert not run_tests("def f(): return 1", "assert f() == 2").passed
        assert "ended before" in said("import os; os._exit(0)")
        assert "FileNotFoundError" in said("open('/etc/passwd')")
        assert "PermissionError" in said("import socket; socket.socket()")
        assert "Errno 30" in said("open('/x', 'w')")
        assert "MemoryError" in said("x = bytearray(1 << 30)")
        assert "BlockingIOError" in said("import os\\nwhile True: os.fork()")
        assert "took more" in said("import time; time.sleep(1000)")
        """)
    ids = ["--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run(
        [setpriv, *ids, python, "-B", "-c", program],
        cwd="/", env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT}/lab"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "Permission denied" in done.stderr.splitlines()[-1:]:
        pytest.skip("an unprivileged user cannot read this checkout, or has an old Python")
    assert done.returncode == 0, done.stderr


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    check_sandbox.cache_clear()
    with pytest.raises(ConfigError, match=r"install bubblewrap"):
        check_sandbox()


def test_where_bubblewrap_does_not_work_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check_sandbox.cache_clear()
    with pytest.raises(ConfigError, match=r"does not work here: No permissions to create"):
        check_sandbox()


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        system_call_filter()


def running() -> str:
    """Return the processes of sandboxes that this process started and that still run."""
    import psutil

    ours = psutil.Process().children(recursive=True)
    return ", ".join(" ".join(p.cmdline()) for p in ours if "inside.py" in " ".join(p.cmdline()))
