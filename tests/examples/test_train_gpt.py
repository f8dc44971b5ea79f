from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import train_gpt
from gpt.console import Console


def test_defaults_plan_two_faults() -> None:
    arguments = train_gpt.parse_arguments([])
    assert [fault.kind for fault in arguments.plan] == ["worker", "node"]
    assert (arguments.steps, arguments.snapshot_every, arguments.out) == (100, 5, None)


def test_an_existing_cluster_keeps_its_nodes() -> None:
    assert [fault.kind for fault in train_gpt.parse_arguments(["--address", "auto"]).plan] == ["worker"]


def test_no_faults_allows_any_number_of_steps() -> None:
    assert train_gpt.parse_arguments(["--no-faults", "--steps", "1"]).plan == []


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--steps", "20"], ["--snapshot-every", "0"], ["--steps", "x"]])
def test_senseless_arguments_end_the_program(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments(argv)
    assert "error: " in capsys.readouterr().err


def test_a_failure_is_told_and_its_log_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        os.write(1, b"noise\n")
        raise RuntimeError("the cluster is on fire")

    monkeypatch.setattr(train_gpt, "demonstrate", fail)
    assert train_gpt.main(["--out", str(tmp_path)]) == 2
    printed = capfd.readouterr().out
    assert "error: RuntimeError: the cluster is on fire" in printed
    assert f"log: {tmp_path / 'train_gpt.log'}" in printed
    assert "noise" not in printed
    log = (tmp_path / "train_gpt.log").read_text()
    assert "noise" in log
    assert "Traceback" in log


def test_console_keeps_even_the_noise_of_other_processes_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Console(tmp_path / "log") as console:
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'noise')"], check=True)
        console.say("status")
    os.write(1, b"after")
    printed = capfd.readouterr().out
    assert printed.startswith("[")
    assert printed.endswith("status\nafter")
    assert (tmp_path / "log").read_text() == "noise"


def test_verbose_console_shows_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Console(tmp_path / "log", verbose=True) as console:
        print("noise")
        console.say("status")
    assert "noise" in capfd.readouterr().out
