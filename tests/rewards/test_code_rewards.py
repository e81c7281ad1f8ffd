"""Programs tested in sandboxes: which programs pass, and what they cannot do, see or forge."""
# ruff: noqa: E501 - programs in one line

import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import time
import types

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from waits import is_running, until

from podrl.rewards import code
from podrl.rewards.code import CodeConfig, code_of
from podrl.rewards.compose import RewardConfig, RewardError, Rewards
from podrl.rewards.sandbox import checker, host, values
from podrl.rewards.sandbox.host import RefusedError, Sandboxes

LIMITS = {"memory_mb": 256, "cpu_s": 1, "wall_s": 120, "threads": 4, "file_mb": 4, "disk_mb": 8}


def refused() -> str:
    try:
        Sandboxes(LIMITS, at_once=1).close()
    except RefusedError as error:
        return str(error)
    return ""


WHY = refused()
isolates = pytest.mark.skipif(bool(WHY), reason=f"this host isolates no programs: {WHY}")


@pytest.fixture(scope="module")
def sandboxes():
    os.environ["PODRL_TEST_TOKEN"] = "secret-of-the-job"
    made = Sandboxes(LIMITS, at_once=16)
    yield made
    made.close()
    del os.environ["PODRL_TEST_TOKEN"]


def job(program, *tests, setup=""):
    return {"program": program, "tests": list(tests), "setup": setup, "all": True}


def prints(program, output="", given=""):
    return job(program, {"input": given, "output": output})


HONEST = {
    "a function": job("def add(a, b):\n    return a + b", "assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"),
    "all plain values": job(
        "def same(x):\n    return x",
        "for x in (None, True, -1.5, 10**40, 'ä\\ud800', b'\\x00', 1j, [1, [2]], (1,), {1: (2,)}, {3}, frozenset({4})):\n"
        "    assert same(x) == x and type(same(x)) is type(x)",
    ),
    "an argument that is changed": job("def sort(x):\n    x.sort()", "x = [2, 1]; sort(x); assert x == [1, 2]"),
    "an argument of a subclass that is changed": job(
        "def turn(x):\n    x.reverse()",
        "class Row(list): pass\nx = Row([2, 1]); turn(x); assert x == [1, 2]",
        "class Bytes(bytearray): pass\nx = Bytes(b'ab'); turn(x); assert x == b'ba'",
    ),
    "an exception": job(
        "class Bad(ValueError): pass\ndef fail():\n    raise Bad('no')",
        "try:\n    fail()\nexcept ValueError as error:\n    assert 'no' in str(error)\nelse:\n    raise AssertionError",
    ),
    "an object": job(
        "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
        "    def __len__(self): return len(self.x)\n    def pop(self): return self.x.pop()",
        "s = Stack(); s.push(1); s.push(2); assert len(s) == 2 and s.pop() == 2 and s.x == [1]",
    ),
    "a generator": job("def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2]"),
    "a counter": job("import collections\ndef c(s): return collections.Counter(s)", "assert c('aab') == {'a': 2, 'b': 1}"),
    "a check function": job("def f(x): return -x", "def check(g):\n    assert g(1) == -1\ncheck(f)"),
    "a set-up": job("def area(r): return 3.14159265 * r", "assert math.isclose(area(1), math.pi, rel_tol=1e-6)", setup="import math"),
    "a script": prints("print(sum(map(int, input().split())))\n\n", "6", "1 2 3\n"),
    "a thread": prints("import threading\nthreading.stack_size(1 << 25)\nt = threading.Thread(target=print, args=(7,)); t.start(); t.join()", "7\n"),
    "a file": prints("open('x', 'w').write('5'); print(open('/tmp/x').read())", "5"),
}  # fmt: skip
FORGED = {
    "prints the marker": job("print('passed')\nprint('{\"passed\": [true]}')", "assert f(1) == 2"),
    "exits early": job("import os\nos._exit(0)", "assert f(1) == 2"),
    "exits early, nicely": job("import sys\nsys.exit(0)", "assert f(1) == 2"),
    "exits in the call": job("import os\ndef f(x): os._exit(0)", "assert f(1) == 2"),
    "a script that exits early": prints("import sys\nsys.exit(0)", "6"),
    "right, but fails": prints("print(6)\nraise SystemExit(3)", "6"),
    "equals everything": job("class A:\n    def __eq__(self, o): return True\ndef f(x): return A()", "assert f(1) == 2"),
    "is always true": job("class A:\n    def __bool__(self): return True\ndef f(x): return A()", "assert f(1)"),
    "its own sorted": job("def sorted(x): return []\ndef f(x): return 1", "assert sorted([f(1)]) == sorted([2])"),
    "its own isinstance": job("def isinstance(*x): return True\ndef f(x): return 1", "assert isinstance(f(1), str)"),
    "reads the tests": job(
        "import gc, sys\ndef f(x):\n    n = 'expected' + chr(45) + '7'\n    found = [o for o in gc.get_objects() if isinstance(o, list) and n in repr(o)]\n"
        "    frame, text = sys._getframe().f_back, ''\n    while frame: text += repr(frame.f_locals); frame = frame.f_back\n"
        "    return n if found or n in text else 'unknown'",
        "assert f(1) == 'expected' + '-7'",
    ),
    "answers on every descriptor": job(
        "import os, json, struct\nbody = b'{\"value\": true, \"arguments\": []}'\nfor n in range(64):\n"
        "    try: os.write(n, b'{\"passed\": [true]}')\n    except OSError: pass",
        "assert f(1) == 2",
    ),
    "answers with nonsense": job(
        "import os, struct\nbody = b'[' * 100000\nos.write(3, struct.pack('>I', len(body)) + body)", "assert f(1) == 2"
    ),
    "kills the others": job("import os, signal\nos.kill(-1, signal.SIGKILL)\ndef f(x): return x", "assert f(1) == 2"),
}  # fmt: skip
# Each program prints 'escaped' if it gets further than it may.
TRIES = {
    "home": f"import os\nfor p in ({str(pathlib.Path.home())!r} + '/.bashrc', '/etc/passwd', {__file__!r}, '/proc/1/environ', '/sys'):\n    assert not os.path.exists(p), p",
    "environment": "import os\nassert 'secret-of-the-job' not in repr(os.environ)",
    "root": "import os\nassert os.getuid() == os.geteuid() == 65534\nos.setuid(0)",
    "writes outside": "for p in ('/x', '/usr/lib/x', '/dev/x', os.__file__):\n    try: open(p, 'a')\n    except OSError: pass\n    else: raise SystemExit(print('escaped'))\nraise OSError",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
    "host's machine": "import socket\nsocket.socket(40, socket.SOCK_STREAM).connect((2, 1))",
    "fork": "import os\nos.fork()",
    "program": "import subprocess\nsubprocess.run(['/lib64/ld-linux-x86-64.so.2', '--version'], check=True)",
    "threads": "import threading, time\nfor _ in range(64): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "memory": "x = bytearray(1 << 30)",
    "memory of files": "import os\nos.memfd_create('x')",
    "a large file": "f = open('x', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()",
    "a full disk": "for n in range(64): open(str(n), 'wb').write(bytes(1 << 20))",
    "many files": "for n in range(1 << 14): open(str(n), 'w').close()",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0",
    "trace": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "kill": "import os, signal\nos.kill(os.getppid() + 1000, signal.SIGKILL)",
}  # fmt: skip
CHECKED = ("home", "environment")  # these assert what a program may see, and must not raise


@isolates
@pytest.mark.parametrize("how", ["own", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def test_what_programs_can_and_cannot_do(sandboxes, how):
    tries = {
        name: prints(f"import os\ntry:\n    exec({text!r})\n    print({'' if name in CHECKED else 'escaped'!r})\n"
                     "except (OSError, RuntimeError, MemoryError, AssertionError) as e:\n    print('' if "
                     f"{name not in CHECKED} else repr(e))")
        for name, text in TRIES.items()
    }  # fmt: skip
    if how == "bubblewrap":
        if not (bwrap := shutil.which("bwrap")):
            pytest.skip("bubblewrap is not installed")
        sandboxes._bwrap = bwrap
        tries.pop("many files")  # bubblewrap does not limit the number of files
    before = set(os.listdir(pathlib.Path.home()))
    costly = {
        "an endless loop": prints("while True: pass"),
        "an endless call": job("def f(x):\n    while True: pass", "assert f(1) == 2"),
        "a fork bomb": prints("import os\nwhile True: os.fork()"),
        "10 GB": prints("x = 'a' * (10 << 30)"),
        "endless printing": prints("while True: print('x' * 1000)"),
        "endless recursion": prints("import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"),
        "a long answer": job("def f(x): return 'x' * (1 << 25)", "assert f(1) == 2"),
    }
    jobs = {**FORGED, **costly, **tries, **HONEST}
    verdicts = dict(zip(jobs, sandboxes.test(list(jobs.values())), strict=True))
    sandboxes._bwrap = ""
    assert {name: verdicts[name] for name in HONEST if not all(verdicts[name]["passed"] or [False])} == {}
    assert {name: verdicts[name] for name in tries if verdicts[name]["passed"] != [True]} == {}
    assert {name: verdicts[name] for name in [*FORGED, *costly] if any(verdicts[name].get("passed", [1]))} == {}
    assert set(os.listdir(pathlib.Path.home())) == before


@isolates
@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_program_may_have_as_many_threads_besides_its_first_as_the_setting_says(threads):
    program = "import threading, time\nstarted = 0\ntry:\n    for _ in range(64):\n"
    program += "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); started += 1\n"
    program += "except RuntimeError: print(started)"
    made = Sandboxes(LIMITS | {"threads": threads}, at_once=1)
    (verdict,) = made.test([prints(program, f"{threads}\n")])
    made.close()
    assert verdict["passed"] == [True], verdict


def frame(body) -> bytes:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack(">I", len(body)) + body


OWN = {"reference": [0, "function"]}
NAMES = frame({"names": {"f": OWN}})
FRAMES = [
    frame({"names": {"__builtins__": {"dict": [[n, OWN] for n in ("set", "abs", "all", "len")]}, "f": OWN}}),
    frame({"names": {"__builtins__": OWN, "f": OWN, "__name__": OWN, "__build_class__": OWN, "__import__": OWN}}),
    frame({"names": {"set": OWN, "abs": OWN, "all": OWN, "range": OWN, "f": OWN, "AssertionError": OWN}}),
    *(frame({"names": names}) for names in ([], None, 1, "f", [["f", OWN]], {"f": {}}, {"f": {"reference": []}})),
    *(frame(body) for body in ([], 1, None, "x", {}, {"raised": []}, {"raised": 1, "text": 2}, {"error": "x"})),
    *(frame({"raised": names, "text": "x"}) for names in ([], "ValueError", [1], [None], {}, [["ValueError"]])),
    *(frame(body) for body in (b"", b"{", b"\xff", b"[" * 100000, b"1" * 5000, b'{"a":' * 50000)),
    *(NAMES + frame({"value": True, "arguments": given}) for given in ([], {}, None, [1, 2], {"set": [[]]}, "ab")),
    *(NAMES + frame({"value": value, "arguments": [1]}) for value in ({"int": "zz"}, {"int": 1}, {"set": [{"set": []}, []]}, {"a": 1, "b": 2})),
    *(NAMES + frame({"value": {"dict": value}, "arguments": [1]}) for value in (1, [1], [[1]], [[[], 1]], [[1, 2, 3]])),
    *(NAMES + frame({"value": {"reference": place}, "arguments": [1]}) for place in ([], [1], ["x", 1], [1e400, ""], [-5, ""])),
    *(NAMES + frame({"value": {kind: "zz"}, "arguments": [1]}) for kind in ("bytes", "complex", "__class__", "dict", "int")),
    *(struct.pack(">I", size) for size in (1 << 31, (1 << 24) + 1)),
]  # fmt: skip


@isolates
def test_whatever_a_program_writes_is_data():
    """Frames that a program itself writes to the channel of results earn nothing and stop nothing."""
    chosen = random.Random(0)
    for _ in range(30):  # a valid message with one changed byte
        right = bytearray(NAMES + frame({"value": {"int": "0x7"}, "arguments": [1]}))
        right[chosen.randrange(4, len(right))] = chosen.randrange(256)
        FRAMES.append(bytes(right))
    later = "def f(x): return 'nothing'\n"
    tests = (
        "assert set([abs(f(1))]) == {2}",
        "assert all(f(x) == x + 1 for x in range(3))",
        "assert len({f(1), 2}) == 1",
    )
    jobs = [job(f"import os\nos.write(3, {body!r})\n{later}", *tests) for body in FRAMES]
    impatient = Sandboxes(LIMITS | {"wall_s": 10.0}, at_once=32)  # many frames announce more bytes, which never come
    try:
        verdicts = impatient.test(jobs)
    finally:
        impatient.close()
    assert [(body, v) for body, v in zip(FRAMES, verdicts, strict=True) if v.get("passed") != [False] * 3] == []


@isolates
def test_a_program_may_print_more_than_a_pipe_holds(sandboxes):
    program = "print('p' * 300_000)\ndef f(x):\n    print('q' * 300_000)\n    return x + 1"
    assert [one["passed"] for one in sandboxes.test([job(program, "assert f(1) == 2", "assert f(2) == 2")])] == [
        [True, False]
    ]
    assert [one["passed"] for one in sandboxes.test([prints("print('p' * 300_000)", "p" * 300_000)])] == [[True]]


@isolates
def test_tests_have_the_names_that_they_mention_and_pythons_own(sandboxes):
    program = "math = __import__('math')\ndef f(x): return x\ndef g(x): return x"
    own = job(
        program,
        "assert math.floor(1.5) == 1",
        "assert sorted(n for n in globals() if n[0] != '_') == ['f', 'math']",
        "f",
    )
    assert sandboxes.test([own])[0]["passed"] == [True, True, True]


@isolates
def test_the_tests_have_a_limit_of_memory_of_their_own(sandboxes):
    """The program sends a message of 8 MB that decodes into 350 MB of objects, more than the tests may use."""
    body = f"b'{{\"value\": [' + b'[],' * {5 << 19} + b'[]], \"arguments\": [1]}}'"
    program = f"import os, struct\nbody = {body}\ndef f(x):\n    data = struct.pack('>I', len(body)) + body\n    while data: data = data[os.write(3, data):]"
    (verdict,) = sandboxes.test([job(program, "assert f(1)", "assert True")])
    assert verdict["passed"] == [False, False] and "MemoryError" in verdict["said"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["int", "set", "dict", "reference", "tuple", "bytes", "complex", "x"]), inner, max_size=2),
    max_leaves=8,
)  # fmt: skip


@examples(max_examples=300)
@given(st.dictionaries(st.sampled_from(["names", "value", "arguments", "raised", "text"]), plain, max_size=3) | plain)
def test_a_message_is_a_value_an_exception_or_malformed(message):
    for operation in ("names", "ask"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(frame(message))
            remote = checker._Remote(types.SimpleNamespace(channel=ours), time.monotonic() + 60)  # pyright: ignore[reportArgumentType]
            try:
                remote.names() if operation == "names" else remote.ask(
                    "call", [checker.StandIn(remote, values.Reference(0, "")), 1], {}
                )
            except Exception as error:  # noqa: BLE001 - the exception that the message names, or the error for a malformed message
                raised = isinstance(message, dict) and message.keys() == {"raised", "text"} and not remote.malformed
                assert raised or (isinstance(error, checker._MalformedError) and remote.malformed)
            else:
                assert isinstance(message, dict) and message.keys() == (
                    {"names"} if operation == "names" else {"value", "arguments"}
                )


@isolates
def test_nothing_is_left_of_sandboxes(sandboxes):
    """Programs end with their sandbox, and a sandbox ends with the process that started it."""
    code = (
        "import os, sys, threading, time\nfrom podrl.rewards.sandbox.host import Sandboxes\n"
        f"s = Sandboxes({LIMITS!r} | {{'wall_s': 600}}, at_once=2)\nprint(s._server.pid, flush=True)\n"
        "threading.Thread(target=s.test, args=([{'program': 'import time; time.sleep(600)', 'setup': '', 'all': True, "
        "'tests': [{'input': '', 'output': ''}]}],)).start()\n"
        "while not open(f'/proc/{s._server.pid}/task/{s._server.pid}/children').read(): time.sleep(0.01)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    children = pathlib.Path(f"/proc/{server}/task/{server}/children").read_text().split()
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(is_running, (server, *children))), "the end of the sandboxes")


@isolates
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user without privileges already")
def test_a_user_without_privileges_isolates_too(tmp_path):
    """Runs a copy of the sandbox's files that every user may read, with an interpreter that every user may run."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if (
        not python
        or subprocess.check_output([python, "-c", "import sys; print(sys.version_info >= (3, 11))"]) != b"True\n"
    ):
        pytest.skip("there is no Python 3.11 that every user may run")
    root = pathlib.Path(host.__file__).parents[3]
    copy = pathlib.Path(shutil.copytree(root / "podrl/rewards/sandbox", tmp_path / "podrl/rewards/sandbox"))
    for package in copy.parents[:2]:
        (package / "__init__.py").touch()
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    code = f"from podrl.rewards.sandbox.host import *\ns = Sandboxes({LIMITS!r}, at_once=2)\nprint(json.dumps(s.test({[FORGED['equals everything'], HONEST['a script']]!r})))"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, user=12345, group=12345, extra_groups=[], capture_output=True, text=True
    )
    if "RefusedError" in done.stderr:
        pytest.skip(f"users without privileges cannot isolate programs here: {done.stderr.splitlines()[-1]}")
    assert [verdict["passed"] for verdict in json.loads(done.stdout)] == [[False], [True]]


def test_a_host_that_does_not_isolate_is_refused(monkeypatch):
    monkeypatch.setattr(
        host,
        "_command",
        lambda function, arguments: [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {host._ROOT!r})\n" + _REFUSES,
            *arguments,
        ],
    )
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    with pytest.raises(RefusedError, match=r"Operation not permitted.*user.max_user_namespaces"):
        Sandboxes(LIMITS, at_once=1)


_REFUSES = """
from podrl.rewards.sandbox import kernel, server
kernel._NAMESPACES = 1 << 8 | 1 << 9  # what no kernel clones
kernel._libc = type("Refusing", (), {"syscall": lambda *a: -1, "prctl": lambda *a: 0})()
kernel.ctypes.get_errno = lambda: 1
server.serve()
"""


@isolates
def test_the_reward(tmp_path):
    good, bad = "Here:\n```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return 2\n```"
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    for settings, expected in (
        (CodeConfig(tests="test_list", cpu_s=2), [1.0, 0.0, 0.0]),
        (CodeConfig(tests="test_list", cpu_s=2, score="share"), [1.0, 0.5, 0.0]),
    ):
        with Rewards(RewardConfig(fns=("code",), workers=1, code=settings)) as rewards:
            assert rewards.names == ("code",)
            found = rewards.score(["q"] * 3, [good, bad, "no code"], {"test_list": [tests] * 3})
            assert found.tolist() == [expected]
            if settings.score == "share":
                with pytest.raises(
                    RewardError, match=r"'tests' \(reward.code.tests\)|test_list.*\(reward.code.tests\)"
                ):
                    rewards.score(["q"], [good], {"answer": ["1"]})
                with pytest.raises(RewardError, match="is not Python"):
                    rewards.score(["q"], [good], {"test_list": [["assert ("]]})
                assert rewards.score(["q"], [good], {"test_list": [["f(lambda: 1)"]]}).tolist() == [[0.0]]


def test_programs_and_tests_are_found():
    assert code_of("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "x = 1\n"
    assert code_of("<answer>x = 1</answer>") == "x = 1"
    assert code_of("x = 1") == "x = 1"
    assert code.tests_of('["assert 1", "assert 2"]', "t") == ["assert 1", "assert 2"]
    assert code.tests_of("assert 1", "t") == ["assert 1"]
    pair = [{"input": "1", "output": "2"}]
    assert code.tests_of({"inputs": ["1"], "outputs": ["2"]}, "t") == code.tests_of(json.dumps(pair), "t") == pair
    for wrong in ([], [1], ["a", pair[0]], [{"input": "1"}], [""], {"a": 1}):
        with pytest.raises(ValueError, match=r"\(reward.code.tests\)"):
            code.tests_of(wrong, "t")


def test_a_call_has_the_time_its_programs_may_take():
    config = CodeConfig(at_once=4, wall_s=10.0)
    assert config.longest_s(9) - config.longest_s(4) == 2 * (10 + code._LEAVE_S)
