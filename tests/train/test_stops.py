"""Runs that are killed, run out of disk, or find a damaged state."""

import errno
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from speccompile.train import files
from speccompile.train.checkpoint import STATE_FILE
from speccompile.train.files import OutputError, write_atomically
from speccompile.train.run_log import RunLog, read_log
from tests.train.train_cli import call, losses, make_pair, start, train_line

STEPS = 40


def test_a_killed_run_resumes_to_the_losses_of_an_unbroken_one(tmp_path):
    """A real SIGKILL at a random step, then --resume; losses and weights are equal bit for bit."""
    folder = make_pair(tmp_path)
    extra = f"--steps {STEPS} --layers 2 --accumulate 2 --checkpoint-seconds 0.05"
    call(train_line(folder, "whole", extra))
    process = start(train_line(folder, "killed", extra))
    goal, limit = random.randint(5, 20), time.monotonic() + 120
    while len(losses(folder, "killed")) < goal or not (folder / "killed" / STATE_FILE).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = len(losses(folder, "killed"))
    assert goal <= done < STEPS
    call(train_line(folder, "killed", f"{extra} --resume"))
    assert losses(folder, "killed") == losses(folder, "whole")
    a, b = (torch.load(folder / n / STATE_FILE)["head"] for n in ("whole", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_full_disk_names_folder_and_remedy_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    folder = make_pair(tmp_path)
    call(train_line(folder, "head", "--steps 2"))
    state = (folder / "head" / STATE_FILE).read_bytes()

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    (folder / "again").mkdir()
    (folder / "again" / STATE_FILE).write_bytes(state)
    with pytest.raises(OutputError, match=r"again: disk full while writing .*free space there.*--resume"):
        call(train_line(folder, "again", "--steps 2 --resume"))
    assert (folder / "again" / STATE_FILE).read_bytes() == state
    assert not list((folder / "again").glob("*.part"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB; skipped where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk(small_disk):
    path = small_disk / STATE_FILE
    write_atomically(path, lambda file: torch.save({"small": torch.ones(10)}, file))
    before = path.read_bytes()
    with pytest.raises(OutputError, match="disk full while writing"):
        write_atomically(path, lambda file: torch.save({"large": torch.ones(2**20)}, file))
    assert path.read_bytes() == before
    assert [p.name for p in small_disk.iterdir()] == [STATE_FILE]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/x: cannot be written"):
        write_atomically(tmp_path / "file" / "x", lambda file: file.write(b"1"))


def test_a_bug_while_writing_is_not_called_a_full_disk(tmp_path):
    def fail(_file):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        write_atomically(tmp_path / "x", fail)
    assert not list(tmp_path.iterdir())


def test_the_log_is_cut_at_the_checkpoint(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 2, 3):
        log({"kind": "step", "step": step})
    with log.path.open("a") as file:
        file.write('{"kind": "st')  # the kill
    again = RunLog(tmp_path)
    again.cut(2)
    again({"kind": "step", "step": 3, "new": True})
    assert [r["step"] for r in read_log(log.path)] == [1, 2, 2, 3]
    assert json.loads(Path(log.path).read_text().splitlines()[-1])["new"]
    RunLog(tmp_path)({"kind": "step", "step": 1})
    assert len(read_log(log.path)) == 1


def test_a_damaged_state_is_named(tmp_path):
    folder = make_pair(tmp_path)
    (folder / "head").mkdir()
    (folder / "head" / STATE_FILE).write_bytes(b"not a state")
    with pytest.raises(OutputError, match=f"{STATE_FILE}: damaged state"):
        call(train_line(folder, "head", "--steps 2 --resume"))
