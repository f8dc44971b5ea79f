"""A store's port under attack: nothing changes, the run's own peers are served, and the log stays short."""

from __future__ import annotations

from fuzz_flight import ATTACKS, besiege

# What transport and allocator keep of the largest messages that came at once. 16 MiB with each of some hundred attacks
# would be more if it stayed.
SLACK_BYTES = 500 << 20


def test_attacks_on_the_port_change_nothing_and_stop_nobody():
    report = besiege(10, seed=1)
    assert all(report.attacks[attack.__name__] > 3 for attack in ATTACKS)
    assert report.failures == []
    before, after = report.before, report.after
    assert (after["steps"], after["sources"], after["damaged"]) == ([report.served], ["peer"], [])
    assert (after["taken"], after["filling"]) == (report.served, 0)
    assert after["rss"] < before["rss"] + SLACK_BYTES
    # Handlers do not wait for words that never come, and no connection is kept when its caller is gone.
    assert after["threads"] < before["threads"] + 20
    assert after["files"] < before["files"] + 20
    assert all("does not know the run's secret" in line for line in report.log)
    assert len(report.log) <= 2
