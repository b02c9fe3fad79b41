"""Status pages, which the peers of a rank read: files, call sites, functions, waits."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms
from mpishard import run_in_threads
from mpishard.base import settings
from mpishard.communication.contract import status
from mpishard.communication.contract.call import Call, CollectiveKind, MessageWait
from mpishard.communication.contract.matching import who
from mpishard.communication.contract.status import RankState, StatusPage, StatusReader, records_in
from mpishard.communication.failure.stall import rank_table
from mpishard.communication.mpi import job as job_module


def share(readers, ranks=None):
    """Let the ``readers`` of a whole world open each other's pages; ``ranks`` are on one node."""
    ranks = range(len(readers)) if ranks is None else ranks
    for rank in ranks:
        readers[rank].share(lambda _: [reader._path for reader in readers], ranks)


def shared(world_size):
    """Return readers of one node that have opened each other's pages."""
    readers = [StatusReader(rank, world_size) for rank in range(world_size)]
    share(readers)
    return readers


def counting(read, ranks):
    """Return ``read`` as a function that appends the rank of each page it reads to ``ranks``."""

    def noted(page, *calls):
        record = read(page, *calls)
        ranks.append(record.rank)
        return record

    return noted


def end_process(reader):
    """Change the page to that of a process that is gone."""
    fields = list(status._IDENTITY.unpack_from(reader.page._memory))
    fields[6] = 2**22 + 1  # beyond any process number
    status._IDENTITY.pack_into(reader.page._memory, 0, *fields)


@pytest.fixture
def no_folder(monkeypatch):
    """Remove the folder of the job from the environment."""
    monkeypatch.delenv("MPISHARD_JOB_FOLDER", raising=False)


def a_call(number, line=1, method="", kind=CollectiveKind.ALL_REDUCE, group=""):
    call = Call.describe(kind, np.ones((2, 3)), sequence=number)
    call.group = group
    call.filename, call.line, call.method = "train.py", line, method
    return call


class TestFiles:
    def test_ranks_read_each_other_s_pages(self, no_folder):
        readers = shared(3)
        group = "tensor group 4 (ranks 1, 2)"
        for number in range(1, settings.CALL_LOG_LENGTH + 6):
            readers[1].page.record(a_call(number, number, group=group), None)
        for reader in readers:
            records = reader.records()
            assert [len(r.calls) for r in records] == [0, settings.CALL_LOG_LENGTH, 0]
            last = records[1].calls[-1]
            assert (last.sequence, last.group) == (261, "tensor group 4 (ranks 1, 2)")
            assert last.place == "train.py:261"
            assert records[1].last_of("tensor group 4 (ranks 1, 2)") == 261

    def test_files_in_the_job_s_folder_outlive_their_process(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
        early = StatusReader(1, 2)
        assert records_in(tmp_path)[0].state is RankState.STARTED
        assert early.records()[0].state is None
        assert early.records()[0].is_known
        readers = shared(2)
        readers[0].page.end(RankState.RUNNING)
        assert readers[1].records()[0].state is RankState.RUNNING
        assert (tmp_path / readers[0].page.name).exists()

    def test_two_worlds_of_a_job_do_not_read_each_other_s_pages(self, tmp_path, monkeypatch):
        """Two halves of a job of 4 share one folder: both have a rank 0 and a rank 1."""
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
        stranger = StatusReader(0, 2, (0, 1))
        mine = StatusReader(1, 2, (2, 3))
        assert [record.state for record in mine.records()] == [None, RankState.STARTED]
        peer = StatusReader(0, 2, (2, 3))
        assert mine.records()[0].state is RankState.STARTED
        stranger.page.end(RankState.LEFT)
        share([peer, mine])
        assert mine.records()[0].state is RankState.STARTED
        assert [file.launched_rank for file in records_in(tmp_path)] == [0, 2, 3]
        # They end together: one report is enough.
        assert stranger.claim_report(1)
        assert not mine.claim_report(1)

    def test_pages_of_other_nodes_are_read_in_a_shared_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
        here, elsewhere = StatusReader(0, 3), StatusReader(1, 3)
        monkeypatch.delenv("MPISHARD_JOB_FOLDER")
        without = StatusReader(2, 3)
        share([here, elsewhere, without], [0])
        elsewhere.page.end(RankState.RUNNING)
        assert [record.is_known for record in here.records()] == [True, True, False]
        assert here.records()[1].state is RankState.RUNNING

    def test_a_folder_that_does_not_exist_on_this_node_is_ignored(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path / "on another node"))
        readers = shared(2)
        assert all(record.is_known for record in readers[1].records())
        assert list(tmp_path.iterdir()) == []

    def test_a_world_of_one_leaves_nothing_in_the_job_s_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
        (reader,) = shared(1)
        assert [record.rank for record in reader.records()] == [0]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name")
    def test_a_page_in_memory_outlives_its_process(self, no_folder):
        script = (
            "import os, sys\n"
            "from mpishard.communication.contract.status import RankState\n"
            "from mpishard.communication.contract.status import StatusReader\n"
            "reader = StatusReader(1, 2)\n"
            "reader.page.end(RankState.RUNNING)\n"
            "print(reader._path, flush=True)\n"
            "input()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            path = Path(child.stdout.readline().decode().strip())
            reader = StatusReader(0, 2)
            reader.share(lambda own: [own, path], [0, 1])
            assert reader.dead_rank() is None
            child.kill()
        assert not path.exists()
        record = reader.records()[1]
        assert (record.state, record.is_alive) == (RankState.RUNNING, False)
        assert reader.dead_rank() == 1

    def test_a_world_that_begins_again_leaves_the_old_file_to_its_readers(self, tmp_path):
        old, new = StatusPage(0, 2), StatusPage(0, 2)
        old.publish(tmp_path)
        reader = status._open(tmp_path / old.name)
        new.publish(tmp_path)
        new.end(RankState.RUNNING)
        old.end(RankState.LEFT)
        assert status._read(reader).state is RankState.LEFT
        assert [p.name for p in tmp_path.iterdir()] == [new.name]

    def test_a_page_keeps_its_content_when_it_is_published(self, tmp_path):
        page = StatusPage(0, 2)
        page.record(a_call(1, group="a row"), None)
        page.end(RankState.RUNNING)
        page.publish(tmp_path)
        page.record(a_call(2), None)
        (record,) = records_in(tmp_path)
        assert record.state is RankState.RUNNING
        assert [(c.number, c.group) for c in record.calls] == [(1, "a row"), (2, "")]
        assert record.pid == os.getpid()

    def test_other_files_in_the_folder_are_ignored(self, tmp_path):
        page = StatusPage(0, 2)
        page.publish(tmp_path)
        (tmp_path / "rank-1-1-0.calls").write_bytes(b"short")
        (tmp_path / "rank-2-1-0.calls").write_bytes(bytes(status.PAGE_BYTES))
        assert [record.rank for record in records_in(tmp_path)] == [0]

    def test_an_existing_file_or_link_is_replaced_and_not_written(self, tmp_path, monkeypatch):
        page, precious = StatusPage(0, 2), tmp_path / "precious"
        precious.write_text("keep")
        path = tmp_path / page.name
        path.symlink_to(precious)
        page.publish(tmp_path)
        assert not path.is_symlink()
        path.unlink()
        assert precious.read_text() == "keep"
        # Another user puts it there between the two steps.
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        for trap in (lambda: path.symlink_to(precious), path.touch):
            trap()
            with pytest.raises(FileExistsError):
                page.publish(tmp_path)
            os.unlink(path)  # noqa: PTH108
        assert precious.read_text() == "keep"

    def test_training_goes_on_without_files_and_one_rank_warns(
        self, no_folder, monkeypatch, caplog
    ):
        def full(handle, start, length):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        readers = [StatusReader(rank, 2) for rank in range(2)]
        with caplog.at_level(logging.WARNING, "mpishard"):
            share(readers)
        assert len(caplog.records) == 1
        assert "rank 0 could not share its status page" in caplog.text
        assert "No space left" in caplog.text
        readers[1].page.record(a_call(1), None)
        assert len(readers[1].records()[1].calls) == 1
        assert not readers[1].records()[0].is_known
        assert readers[1].dead_rank() is None
        assert readers[1].claim_report(1)

    def test_a_page_out_of_reach_leaves_the_others_readable(self, no_folder):
        readers = [StatusReader(rank, 3) for rank in range(3)]
        readers[1]._path = Path("/proc/self/fd/0")
        share(readers)
        assert [record.is_known for record in readers[0].records()] == [True, False, True]
        assert readers[0].dead_rank() is None


class TestReports:
    def test_one_rank_claims_the_report_and_records_the_exit_code(self, no_folder):
        readers = shared(2)
        assert readers[1].claim_report(124)
        assert not readers[1].claim_report(1)
        assert not readers[0].claim_report(1)
        assert readers[0].records()[1].state is RankState.REPORTED
        assert readers[0].records()[1].code == 124

    def test_a_report_of_another_node_counts_in_a_shared_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
        here, elsewhere = StatusReader(0, 2), StatusReader(1, 2)
        share([here, elsewhere], [0])
        elsewhere.page.end(RankState.REPORTED)
        assert not here.claim_report(1)

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are files there")
    def test_a_process_that_is_gone_is_dead_unless_it_left(self, no_folder):
        readers = shared(2)
        assert readers[0].dead_rank() is None
        end_process(readers[1])
        assert readers[0].dead_rank() == 1
        assert not readers[0].records()[1].is_alive
        readers[1].page.end(RankState.LEAVING)  # and never got out
        assert readers[0].dead_rank() == 1
        readers[1].page.end(RankState.LEFT)
        assert readers[0].dead_rank() is None

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are files there")
    def test_a_stopped_process_is_detected(self, no_folder):
        readers = shared(2)
        assert not readers[0].records()[1].is_stopped
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            fields = list(status._IDENTITY.unpack_from(readers[1].page._memory))
            fields[6:8] = child.pid, status._process(child.pid)[1]
            status._IDENTITY.pack_into(readers[1].page._memory, 0, *fields)
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            record = readers[0].records()[1]
            child.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, child.pid, os.WCONTINUED)
            after = readers[0].records()[1]
            child.kill()
        assert (record.is_stopped, record.is_alive, record.pid) == (True, True, child.pid)
        assert readers[0].dead_rank() == 1  # now it is gone
        assert (after.is_stopped, after.is_alive) == (False, True)

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are files there")
    @pytest.mark.parametrize("gone", [(1,), (3,), (0, 3), (1, 2), (4, 0, 1)])
    @pytest.mark.parametrize("left", [(), (2,)])
    def test_each_rank_watches_the_next(self, no_folder, gone, left):
        readers = shared(5)
        for rank in left:
            readers[rank].page.end(RankState.LEFT)
        for rank in gone:
            end_process(readers[rank])
        found = {
            rank: reader.dead_rank()
            for rank, reader in enumerate(readers)
            if rank not in (*gone, *left)
        }
        dead = set(gone) - set(left)
        assert set(found.values()) <= dead | {None}
        # The one before the first of those that are gone, in the ring, sees it at once.
        for rank in dead:
            before = (rank - 1) % 5
            while before in left:
                before = (before - 1) % 5
            assert before in gone or found[before] == rank
        # Whoever is stopped meanwhile is watched by the others in turn.
        for rank in found:
            assert any(readers[rank].dead_rank() in dead for _ in range(4))

    def test_watching_reads_as_many_pages_on_a_large_node(self, no_folder, monkeypatch):
        readers = shared(40)
        asked = []
        monkeypatch.setattr(status, "_read", counting(status._read, asked))
        for _ in range(39):
            before = len(asked)
            assert readers[0].dead_rank() is None
            assert len(asked) - before <= 2
        assert set(asked) == set(range(1, 40))

    def test_a_process_that_cannot_be_seen_is_not_dead(self, no_folder, monkeypatch):
        monkeypatch.setattr(status, "_process", lambda pid: (b"", -1))
        assert shared(2)[0].dead_rank() is None


def test_waits_are_read_as_they_were_written(no_folder):
    readers = shared(2)
    first, second = a_call(1), a_call(2)
    for call in first, second:
        readers[1].page.record(call, None)
    assert readers[0].records()[1].waits is None
    assert readers[0].page.read().last is None
    assert readers[1].page.read().last == second
    readers[1].page.wait(first)  # issued before the second, and waited for after it
    assert readers[0].records()[1].waits == first
    message = MessageWait(0, 7, True, "pipeline group 3 (ranks 0, 1)")
    readers[1].page.wait(message)
    record = readers[0].records()[1]
    assert record.waits == message
    assert record.waited < 60
    readers[1].page.go_on()
    assert readers[0].records()[1].waits is None
    assert not readers[0].records()[1].waited


class TestPlaces:
    def calls_of(self, body, world_size=2):
        def run(backend):
            body(backend)
            return [(c.kind.label, c.method) for c in backend.status.read().calls]

        return run_in_threads(world_size, run)[0]

    def test_the_user_s_own_collectives_have_no_method(self):
        def body(backend):
            backend.barrier()
            backend.all_reduce_async(np.ones(3)).wait()
            assert backend.split(0) is not None

        assert self.calls_of(body) == [("barrier", ""), ("all_reduce", ""), ("split", "")]

    def test_a_method_is_named_by_the_class_of_the_object(self, monkeypatch):
        monkeypatch.setenv("MPISHARD_ARENA", "off")
        x, y = np.ones((4, 3)), np.ones((4, 1))
        seen = {}

        def body(backend):
            model = ms.as_distributed(ms.nn.MLP([3, 1], seed=0), backend)
            optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend)
            before = backend.status.count
            for name, call in {
                "FSDPOptimizer.step": lambda: optimizer.step(model, x, y),
                "FSDPModel.predict": lambda: model.predict(x),
                "FSDPModel.unsharded": lambda: model.unsharded().__enter__(),
            }.items():
                call()
                calls = backend.status.read().calls
                if backend.rank == 0:
                    seen[name] = {c.method for c in calls[before:]}
                assert {Path(c.filename).name for c in calls[before:]} == {"test_status.py"}
                before = len(calls)

        run_in_threads(2, body)
        assert seen == {name: {name} for name in seen}

    def test_functions_and_constructors_are_named(self, tmp_path):
        def body(backend):
            ms.ProcessMesh(backend, tensor=2, data=1, order=("tensor", "data", "pipeline"))
            model = ms.as_distributed(ms.nn.MLP([3, 1], seed=0), backend, "ddp")

            ms.checkpoint.save(tmp_path / "saved", model)

        assert list(dict.fromkeys(method for _, method in self.calls_of(body))) == [
            "ProcessMesh",
            "as_distributed",
            "checkpoint.save",
        ]

    def test_one_line_that_calls_two_functions(self, monkeypatch):
        monkeypatch.setenv("MPISHARD_ARENA", "off")

        def body(backend):
            model = ms.as_distributed(ms.nn.MLP([3, 1], seed=0), backend)
            for call in (backend.barrier, model.gather_full_parameters):
                call()

        calls = self.calls_of(body)
        assert ("barrier", "") in calls
        assert calls[-1] == ("all_gather", "FSDPModel.gather_full_parameters")


class TestGroups:
    def test_ranks_of_groups_by_their_numbers_in_the_world(self):
        def body(backend):
            assert backend.world_ranks == tuple(range(6))
            assert backend.label == ""
            odd = backend.split(backend.rank % 2, key=-backend.rank)
            inner = odd.split(0 if odd.rank < 2 else None)
            return (
                odd.world_ranks,
                odd.label,
                inner and (inner.world_ranks, inner.label),
            )

        found = run_in_threads(6, body)
        assert found[1] == ((5, 3, 1), "group 1 (ranks 1, 3, 5)", None)
        assert found[3] == (
            (5, 3, 1),
            "group 1 (ranks 1, 3, 5)",
            ((5, 3), "group 1.1 (ranks 3, 5)"),
        )
        assert found[0][0] == (4, 2, 0)

    def test_axes_of_a_mesh_are_named(self):
        def body(backend):
            mesh = ms.ProcessMesh(backend, pipeline=2, tensor=2, data=2)
            return [
                (g.world_ranks, g.label.split(" group")[0])
                for g in (mesh.pipeline, mesh.tensor, mesh.data, mesh.model)
            ]

        assert run_in_threads(8, body)[3] == [
            ((3, 7), "pipeline"),
            ((1, 3), "tensor"),
            ((2, 3), "data"),
            ((1, 3, 5, 7), "model"),
        ]

    def test_a_group_exchanges_world_ranks_if_its_backend_does_not_set_them(self, monkeypatch):
        """A backend of a third party does not set them, so its groups exchange them."""
        steps = ms.InMemoryCommunicationBackend._steps_split

        def silent(self, call, color, key):
            member = yield from steps(self, call, color, key)
            if member is not None:
                member._world_ranks = None
            return member

        monkeypatch.setattr(ms.InMemoryCommunicationBackend, "_steps_split", silent)

        def body(backend):
            odd = backend.split(backend.rank % 2)
            return odd.world_ranks, odd.split(0, key=-odd.rank).world_ranks

        assert run_in_threads(4, body)[1] == ((1, 3), (3, 1))


def test_the_page_of_a_thread_holds_all_its_worlds():
    def body(backend):
        group = backend.split(0)
        group.barrier()
        backend.barrier()
        record = backend.status.read()
        return [(c.number, c.kind.label, c.group) for c in record.calls]

    name = "group 1 (ranks 0, 1)"
    assert run_in_threads(2, body)[1] == [
        (1, "split", ""),
        (2, "barrier", name),
        (3, "barrier", ""),
    ]


def test_a_page_has_the_state_of_its_rank():
    backend = ms.InMemoryCommunicationBackend(0, 1, "a page")
    assert StatusPage(0, 1).read().state is RankState.STARTED
    with backend:
        assert backend.status.read().state is RankState.RUNNING
    assert backend.status.read().state is RankState.LEFT


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory of Linux")
def test_only_files_with_the_name_of_a_library_are_listed():
    script = (
        "import mmap, os, sys\n"
        "from mpishard.communication.mpi.job import library_files\n"
        "for name in sys.argv[1:]:\n"
        "    with open(name, 'wb+') as f:\n"
        "        f.truncate(4096)\n"
        "        globals()[name] = mmap.mmap(f.fileno(), 4096)\n"
        "os.remove(sys.argv[2])\n"
        "print(*library_files())\n"
    )
    number = os.getpid()
    names = [f"/dev/shm/{name}_{number}" for name in ("mpich_shm", "mpich_shm_gone", "dataset")]
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script, *names], capture_output=True, text=True, check=True
        )
    finally:
        for name in names:
            Path(name).unlink(missing_ok=True)
    assert ended.stdout.split() == [names[0]]
    path = "/dev/shm/sm_segment.vm.0.f42c0001.1"
    line = f"7f2c-7f2d rw-s 00000000 00:1a 12 {path}"
    assert job_module._FILES.findall(f"{line}\n{line} (deleted)\n") == [path]


def test_a_long_path_keeps_its_end():
    page = StatusPage(0, 1)
    call = a_call(1)
    call.filename = "/very/long" * 40 + "/train.py"
    page.record(call, None)
    assert rank_table([page.read()], 0.0).endswith("/train.py:1")


def test_later_calls_have_the_new_label_of_a_world():
    page = StatusPage(0, 1)
    for group in ("", "a row"):
        page.record(a_call(1, group=group), sys._getframe())
    assert [logged.group for logged in page.read().calls] == ["", "a row"]


@pytest.mark.mpi
def test_processes_read_each_other_s_pages(backend):
    assert backend.world_ranks == tuple(range(backend.world_size))
    group = backend.split(backend.rank % 2, key=-backend.rank)
    mine = [rank for rank in range(backend.world_size) if rank % 2 == backend.rank % 2]
    assert list(group.world_ranks) == mine[::-1]
    group.all_reduce(np.ones(3))
    backend.barrier()
    reader = backend._job.statuses
    records = reader.records()
    backend.barrier()
    for record in records:
        assert record.is_known
        assert record.is_alive
        assert record.state is RankState.RUNNING
        theirs = [rank for rank in range(backend.world_size) if rank % 2 == record.rank % 2]
        last = [c for c in record.calls if c.kind is CollectiveKind.ALL_REDUCE][-1]
        assert last.group.endswith(f"({who(theirs)})")
        assert last.filename.endswith("test_status.py")
    assert reader.dead_rank() is None
    for path in reader.page.read().shared_memory:
        assert Path(path).parent == Path("/dev/shm")


@pytest.mark.parametrize("count", [255, 256, 257, 600])
def test_the_call_log_has_the_last_256_collectives(count):
    assert settings.CALL_LOG_LENGTH == 256

    def body(backend):
        for _ in range(count):
            backend.barrier()
        return [call.sequence for call in backend.status.read().calls]

    kept = list(range(max(1, count - 255), count + 1))
    assert run_in_threads(2, body) == [kept, kept]
    page = StatusPage(0, 1)
    for number in range(1, count + 1):
        page.record(a_call(number), None)
    assert [call.sequence for call in page.read().calls] == kept
