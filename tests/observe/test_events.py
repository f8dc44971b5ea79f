"""The log of a run's events: on storage that works, that refuses, and that takes its time."""

from __future__ import annotations

import json
import logging
import threading

import pyarrow.fs
import pytest

from ray_jax_ckpt.observe.events import FILE, EventLog
from ray_jax_ckpt.storage.files import write_whole


class SlowHandler(pyarrow.fs.FileSystemHandler):
    """A filesystem on which nothing ends before it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def _wait(self, *_):
        self.go_on.wait()
        raise FileNotFoundError("nothing here")

    def get_type_name(self):
        return "slow"

    def normalize_path(self, path):
        return path

    get_file_info = get_file_info_selector = create_dir = delete_dir = delete_dir_contents = _wait
    delete_root_dir_contents = delete_file = move = copy_file = _wait
    open_input_stream = open_input_file = open_output_stream = open_append_stream = _wait


def lines(directory):
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def test_events_are_written_and_those_of_an_earlier_driver_stay(tmp_path):
    for number in (1, 2):
        log = EventLog(pyarrow.fs.LocalFileSystem(), str(tmp_path), write=write_whole)
        log.add("decision", step=number)
        log.flush(10)
    assert [(one["event"], one["step"]) for one in lines(tmp_path)] == [("decision", 1), ("decision", 2)]


def test_a_directory_that_cannot_be_written_is_a_warning_and_nothing_more(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = EventLog(pyarrow.fs.LocalFileSystem(), str(tmp_path / "file"), write=write_whole)
    with caplog.at_level(logging.WARNING):
        log.add("decision", step=1)
        log.flush(10)
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("filesystem", [None, "slow"])
def test_a_storage_that_does_not_answer_holds_nobody_up(filesystem):
    handler = SlowHandler()
    log = EventLog(pyarrow.fs.PyFileSystem(handler) if filesystem else None, "run", write=write_whole)
    for step in range(100):
        log.add("decision", step=step)
    log.flush(0.1)
    # Here nothing of it has ended.
    handler.go_on.set()
    log.flush(20)
