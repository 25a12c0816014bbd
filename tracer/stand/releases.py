"""What the stand has to know about each SGLang release that it runs."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = "0.5.23"

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_IO_BACKENDS = ("direct", "kernel")
_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


class UnsupportedError(ValueError):
    """A release that the stand does not run, or an option that a release does not have."""


@dataclass(frozen=True)
class Release:
    """One release. Choices are those of its command line that make sense on a CPU."""

    name: str
    mem_layouts: tuple[str, ...] = _LAYOUTS
    """Choices of `--hicache-mem-layout`; empty where there is no such flag and the layout is layer_first."""
    io_backends: tuple[str, ...] = _IO_BACKENDS
    write_policies: tuple[str, ...] = _WRITE_POLICIES
    tree_core_choice: bool = False
    """Whether the radix tree's core can be chosen."""
    plugins: bool = True
    """Whether it loads plugins; before 0.5.11 there are none."""
    cached_tokens_details: bool = True
    """Whether an answer tells where its cached tokens were; before 0.5.9 it only tells how many."""
    both_attention_backends: bool = False
    """Whether `--attention-backend` leaves the one for decoding open, and each is to be given."""

    def check(self, option: str, value: str, choices: tuple[str, ...]) -> None:
        """Raise UnsupportedError unless `value` is one of `choices`."""
        if value not in choices:
            raise UnsupportedError(f"SGLang {self.name} has no {option} {value} (it has {', '.join(choices)})")


_ALL = (
    Release(NEWEST, tree_core_choice=True),
    Release("0.5.17"),
    Release("0.5.14"),
    Release("0.5.12.post1"),
    Release("0.5.10.post1", plugins=False),
    Release("0.5.8", plugins=False, cached_tokens_details=False),
    Release("0.5.6.post2", plugins=False, cached_tokens_details=False, both_attention_backends=True),
    Release(
        "0.4.10.post2",
        plugins=False,
        cached_tokens_details=False,
        mem_layouts=("layer_first", "page_first"),
    ),
    Release("0.4.9.post6", plugins=False, cached_tokens_details=False, mem_layouts=()),
)
RELEASES = {release.name: release for release in _ALL}


def known_release(name: str) -> Release:
    """The release of that name. Raises UnsupportedError if the stand does not run it."""
    release = RELEASES.get(name)
    if release is None:
        raise UnsupportedError(f"the stand does not run SGLang {name} (it runs {', '.join(RELEASES)})")
    return release
