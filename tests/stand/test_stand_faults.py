from __future__ import annotations

import pytest

from kvwitness.patches.stand import entry
from kvwitness.patches.stand.faults import Fault, UnknownFaultError, parse_faults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("  ", ()),
        ("copy-skip", (Fault("copy-skip"),)),
        ("copy-zero:d2h", (Fault("copy-zero", "d2h"),)),
        ("copy-corrupt:h2d", (Fault("copy-corrupt", "h2d"),)),
        ("host-flip", (Fault("host-flip"),)),
        ("host-flip:3", (Fault("host-flip", layer=3),)),
        ("copy-delay:2.5", (Fault("copy-delay", None, 2.5),)),
        ("copy-delay:20:h2d", (Fault("copy-delay", "h2d", 20.0),)),
        (
            "copy-zero:h2d, load-back-too-short,load-back-no-memory",
            (Fault("copy-zero", "h2d"), Fault("load-back-too-short"), Fault("load-back-no-memory")),
        ),
    ],
)
def test_known_faults(text: str, expected: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "copy-explode",
        "copy_zero",
        "Copy-zero",
        "copy-zero,",
        ",",
        "copy-zero:up",
        "copy-zero:",
        "copy-zero:h2d:d2h",
        "copy-corrupt",
        "copy-corrupt:d2h",
        "copy-delay",
        "copy-delay:h2d",
        "copy-delay:0",
        "copy-delay:-1",
        "copy-delay:nan",
        "copy-delay:inf",
        "copy-delay:20:h2d:x",
        "load-back-too-short:h2d",
        "host-flip:h2d",
        "host-flip:-1",
        "host-flip:1:2",
        "copy-zero,copy-zero",
    ],
)
def test_anything_else_is_one_clear_error(text: str) -> None:
    with pytest.raises(UnknownFaultError, match="KVWITNESS_STAND_FAULT"):
        parse_faults(text)


def test_direction_decides_which_copies_are_hit() -> None:
    assert Fault("copy-zero", "h2d").acts_on("h2d")
    assert not Fault("copy-zero", "h2d").acts_on("d2h")
    assert not Fault("copy-zero", "h2d").acts_on(None)
    assert Fault("copy-zero").acts_on("d2h")
    assert Fault("copy-zero").acts_on(None)


def test_entry_points_do_nothing_where_this_is_no_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVWITNESS_STAND", raising=False)
    monkeypatch.setenv("KVWITNESS_STAND_FAULT", "copy-explode")
    entry.plugin()
    assert entry.activate() is None


def test_plugin_stops_the_process_on_an_unknown_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    # SystemExit, because SGLang logs an Exception of a plugin and goes on without it.
    monkeypatch.setenv("KVWITNESS_STAND", "1")
    monkeypatch.setenv("KVWITNESS_STAND_FAULT", "copy-explode")
    with pytest.raises(SystemExit, match="unknown fault 'copy-explode'"):
        entry.plugin()
