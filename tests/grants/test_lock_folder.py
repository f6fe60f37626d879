"""The folder of lock files under attack: by other users, by cleaners, by garbage."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import SIZES, A, B, Forked, GiB, Say, holding, is_free

from pytest_cudaenv.grants.lease_table import LeaseTable, LeaseTimeout
from pytest_cudaenv.grants.lock_folder import SHARED_DIRECTORY, LeaseError, lease_directory


def as_user(uid: int, work: Callable[[Say], None]) -> Callable[[Say], None]:
    """The work, done by another user."""

    def changed(say: Say) -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        work(say)

    return changed


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
ALICE, BOB = 61001, 61002


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A place as `/tmp`, which `tmp_path` is not: that is closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        yield Path(name)


class TestFolder:
    def test_which(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", "/scratch/job-1")
        assert lease_directory(None) == SHARED_DIRECTORY
        assert lease_directory("/a/../b") == Path("/b")
        assert lease_directory("here") == Path.cwd() / "here"

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_everybody_may_use_it_whatever_the_umask(self, table: LeaseTable, folder: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            table.acquire([A], 1, memory=1, total=SIZES).release()
            with table.acquire([A], 1), pytest.raises(LeaseTimeout):
                table.acquire([A], 1, timeout=0)
        finally:
            os.umask(before)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        files = list(folder.iterdir())
        assert {f.name.partition(".")[0] for f in files} == {"gate", "device", "share", "queue"}
        assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o666}

    def test_a_folder_of_ones_own_stays_private(self, table: LeaseTable, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        table.acquire([A], 1).release()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @needs_root
    @pytest.mark.parametrize("umask", [0o022, 0o077])
    def test_two_users_exclude_each_other(self, shared_place: Path, umask: int) -> None:
        """Also with fs.protected_regular, which refuses O_CREAT on a file of another user in such a folder."""
        table = LeaseTable(shared_place / "leases")

        def alice(say: Say) -> None:
            os.umask(umask)
            holding(table, A)(say)

        def bob(say: Say) -> None:
            say(f"{is_free(table, A)} {is_free(table, B)}")
            table.acquire([A], 1)
            say("held")

        with Forked(as_user(ALICE, alice)) as first:
            assert first.line() == "held"
            with Forked(as_user(BOB, bob)) as second:
                assert second.line() == "False True"
                first.kill()
                assert second.line() == "held"
                assert second.wait() == 0

    @needs_root
    def test_a_private_folder_of_another_user_is_refused(self, shared_place: Path) -> None:
        mine = shared_place / "leases"
        mine.mkdir(mode=0o755)
        os.chown(mine, ALICE, ALICE)
        with Forked(as_user(BOB, lambda say: LeaseTable(mine).acquire([A], 1).release())) as child:
            line = child.line()
            assert line.startswith("LeaseError: ")
            for word in (str(mine), f"uid {ALICE}", "another user's", "--cuda-lease-dir"):
                assert word in line
        with pytest.raises(LeaseError, match="another user's"):  # root too: Alice could swap it
            LeaseTable(mine).acquire([A], 1)

    @needs_root
    def test_a_place_where_another_user_could_swap_the_folder_is_refused(self, shared_place: Path) -> None:
        os.chown(shared_place, ALICE, ALICE)
        os.chmod(shared_place, 0o755)
        with pytest.raises(LeaseError, match=f"{shared_place} .*uid {ALICE}"):
            LeaseTable(shared_place / "leases").acquire([A], 1)

    @needs_root
    def test_an_unwritable_folder_is_a_clear_error(self, shared_place: Path) -> None:
        closed = shared_place / "leases"
        closed.mkdir(mode=0o755)
        with Forked(as_user(BOB, lambda say: LeaseTable(closed).acquire([A], 1).release())) as child:
            line = child.line()
            assert line.startswith("LeaseError: ")
            for word in (str(closed), "gate", "Permission denied", "uid 0", "open it to you", "--cuda-lease-dir"):
                assert word in line

    def test_a_folder_that_cannot_be_made_is_a_clear_error(self, tmp_path: Path) -> None:
        with pytest.raises(LeaseError, match=f"{tmp_path} .*a/b.*No such file.*make the folders above it"):
            LeaseTable(tmp_path / "a" / "b").acquire([A], 1)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc to refuse")
    def test_a_file_system_that_refuses_is_a_clear_error(self) -> None:
        with pytest.raises(LeaseError, match=r"/proc .*leases"):
            LeaseTable(Path("/proc/leases")).acquire([A], 1)

    def test_a_folder_whose_files_all_may_swap_is_refused(self, table: LeaseTable, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(LeaseError, match=r"mode 0777.*swap.*owner: .*chmod \+t"):
            table.acquire([A], 1)

    @pytest.mark.parametrize("what", ["link", "dangling", "file"])
    def test_what_is_no_folder_is_refused(self, table: LeaseTable, folder: Path, tmp_path: Path, what: str) -> None:
        if what == "file":
            folder.write_text("mine")
        else:
            folder.symlink_to(tmp_path / "elsewhere")
            if what == "link":
                (tmp_path / "elsewhere").mkdir()
        with pytest.raises(LeaseError, match="is not a folder" if what == "file" else "is a symbolic link"):
            table.acquire([A], 1)
        assert not (tmp_path / "elsewhere" / "gate").exists()

    @pytest.mark.parametrize("name", ["gate", f"device.{A}", f"share.{A}.0", "queue.0"])
    def test_links_to_the_files_of_others_are_not_followed(
        self, table: LeaseTable, folder: Path, tmp_path: Path, name: str
    ) -> None:
        treasure = tmp_path / "treasure"
        treasure.write_text("precious")
        folder.mkdir()
        for plant in (os.symlink, os.link):
            plant(treasure, folder / name)
            with pytest.raises(LeaseError, match=rf"{name}.*(symbolic|hard) link.*owner.*remove it"):
                self.use_every_file(table)
            (folder / name).unlink()
        assert treasure.read_text() == "precious"
        os.mkfifo(folder / name)
        with pytest.raises(LeaseError, match="is not a plain file"):
            self.use_every_file(table)

    @staticmethod
    def use_every_file(table: LeaseTable) -> None:
        with table.acquire([A], 1, memory=1, total=SIZES), pytest.raises(LeaseTimeout):
            table.acquire([A], 1, timeout=0)
        table.acquire([A], 1).release()

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"\0" * 5000,
            b"\xff\xfe{",
            b"[" * 60000,
            b"null\n",
            b'{"pid": "x", "since": NaN, "memory": -5, "turn": 1e999, "test": 7}\n',
            b'{"pid": true, "since": 1'
            + b"0" * 400
            + b', "memory": 1e9, "looked": NaN, "turn": 1, "count": 1, "of": {}}',
            b'{"run": "\\u001b[2J\\n", "test": "' + b"x" * 100000,
        ],
        ids=["empty", "zeros", "bytes", "deep", "null", "types", "numbers", "long"],
    )
    def test_garbage_in_the_files_changes_nothing(self, table: LeaseTable, folder: Path, garbage: bytes) -> None:
        self.use_every_file(table)
        for path in folder.iterdir():
            path.write_bytes(garbage)
        assert not table.waited_for([A])
        with table.acquire([A], 1):
            (folder / f"device.{A}").write_bytes(garbage)
            with pytest.raises(LeaseTimeout) as caught:
                table.acquire([A], 1, timeout=0)
            assert "\x1b" not in str(caught.value)
        with table.acquire([A], 1, memory=GiB, total=SIZES):
            (folder / f"share.{A}.0").write_bytes(garbage)
            with pytest.raises(LeaseTimeout):  # its budget is unknown, so the device is full
                table.acquire([A], 1, memory=GiB, total=SIZES, timeout=0)
        with (folder / "queue.0").open("r+") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            (folder / "queue.0").write_bytes(garbage)
            assert is_free(table, A)

    def test_what_others_write_is_fit_for_a_terminal(self, table: LeaseTable, folder: Path) -> None:
        with table.acquire([A], 1):
            (folder / f"device.{A}").write_text(json.dumps({"pid": 7, "run": "\x1b[2J\n", "test": "x" * 9999}) + "\n")
            with pytest.raises(LeaseTimeout, match=r"pid 7 of run \?\[2J\?, test x{300}$"):
                table.acquire([A], 1, timeout=0)

    def test_a_sharer_without_a_budget_counts_as_whole(self, table: LeaseTable, folder: Path) -> None:
        table.acquire([A], 1).release()
        with (folder / f"device.{A}").open("r+") as device:
            fcntl.flock(device, fcntl.LOCK_SH)
            with pytest.raises(LeaseTimeout, match="unknown process"):
                table.acquire([A], 1, memory=1, total=SIZES, timeout=0)

    def test_existing_files_are_opened_without_creating(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """fs.protected_regular refuses O_CREAT on an existing file of another user in a sticky folder."""
        self.use_every_file(table)

        def protected(path: str, flags: int, *args: int, **kwargs: int) -> int:
            if flags & os.O_CREAT and os.path.exists(folder / path):
                raise PermissionError(13, "Permission denied")
            return real(path, flags, *args, **kwargs)

        real = os.open
        monkeypatch.setattr(os, "open", protected)
        self.use_every_file(table)

    def test_a_file_that_is_removed_while_it_is_locked_is_made_again(
        self, table: LeaseTable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table.acquire([A], 1).release()
        path = folder / f"device.{A}"
        removed: list[int] = []

        def clean(descriptor: int, how: int) -> None:
            real(descriptor, how)
            is_ours = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
            if how == fcntl.LOCK_EX | fcntl.LOCK_NB and is_ours and len(removed) < 2:
                removed.append(descriptor)
                path.unlink()

        real = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", clean)
        with table.acquire([A], 1):  # its first look at the file, and the lock, come too late
            assert len(removed) == 2
            assert not is_free(table, A)

    def test_files_are_never_truncated(self, table: LeaseTable, folder: Path) -> None:
        table.acquire([A], 1).release()
        path = folder / f"device.{A}"
        path.write_bytes(b"x" * 5000)
        table.acquire([A], 1).release()
        assert path.stat().st_size == 5000

    @pytest.mark.parametrize("what", ["files", "folder"])
    def test_a_cleaner_that_removes_everything_is_survived(self, table: LeaseTable, folder: Path, what: str) -> None:
        table.acquire([A], 1).release()
        for path in folder.iterdir():
            path.unlink()
        if what == "folder":
            folder.rmdir()
        with table.acquire([A], 1):
            assert not is_free(table, A)
