"""What the benchmark driver measures when asked for what, and how results are shown and compared."""

from __future__ import annotations

import json

import pytest
import run
from bench import plot, tables


def result(name, call_s, **machine):
    found = {
        "time": "2026-01-01T00:00:00Z",
        "commit": "abc",
        "package_changed": False,
        "num_cpus": 2,
        "cpu": "some",
        "memory_gb": 8.0,
        "packages": {"ray": "1", "jax": "2", "orbax-checkpoint": "3"},
        "load_average": [0.5, 0, 0],
    }
    spread = {"median": call_s, "min": call_s / 2, "max": call_s * 2, "n": 5}
    ours = {"seconds": {"call": spread, "gone": None}, "loop_ratios": {"loop every step": 3.5}, "ratios": {}}
    return {"name": name, "machine": found | machine, "load_average_after": [1.5, 0, 0], "runs": {"copies=1": ours}}


def pairs(*argv):
    return run.chosen(run.parse_arguments(argv))


def test_every_theme_has_its_usual_workload():
    assert pairs() == list(run.USUAL.items())
    assert pairs("--theme", "capture") == [("capture", "W1")]


def test_workloads_are_for_themes_that_are_not_about_one():
    assert pairs("--theme", "capture", "leaves", "--workload", "W1", "W3") == [
        ("capture", "W1"),
        ("capture", "W3"),
        ("leaves", "W2"),
    ]


@pytest.mark.parametrize("wrong", [["--repeats", "0"], ["--compare", "/nowhere/at/all"], ["--theme", "speed"]])
def test_what_cannot_be_measured_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        run.parse_arguments(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_table_holds_milliseconds_and_ratios():
    text = tables.markdown(result("capture-W1", 0.0125))
    assert "| call, ms | 12.5 | 6.25 | 25.0 | 5 |" in text
    assert "| loop every step / none | 3.50 | 3.50 | 3.50 | 1 |" in text
    assert "load 0.5 before, 1.5 after" in text
    assert "gone" not in text


def test_an_earlier_result_is_shown_beside_the_new_one(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(result("capture-W1", 0.025, commit="old")))
    (tmp_path / "other.json").write_text(json.dumps([1, 2]))
    earlier = tables.load(tmp_path)
    assert earlier.keys() == {"capture-W1"}
    assert tables.load(tmp_path / "a.json") == earlier
    new = result("capture-W1", 0.0125)
    new["runs"]["copies=2"] = new["runs"]["copies=1"]
    text = tables.page({"capture-W1": new, "memory-W1": result("memory-W1", 1.0)}, earlier)
    assert "commit old" in text
    assert "| call, ms | 12.5 | 6.25 | 25.0 | 5 | 25.0 | 0.50 |" in text
    # A run that the earlier result does not have.
    assert "| call, ms | 12.5 | 6.25 | 25.0 | 5 |  |  |" in text


def test_the_plot_shows_what_there_is(tmp_path):
    plot.draw({"memory-W1": result("memory-W1", 1.0)}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    plot.draw({"capture-W1": result("capture-W1", 0.01)}, tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
