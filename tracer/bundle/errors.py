"""The one error that writing and reading bundles raises."""

from __future__ import annotations


class BundleError(Exception):
    """A bundle cannot be written or read: what is wrong, where, and what the user can do about it."""

    def __init__(self, what: str, where: str, what_to_do: str) -> None:
        super().__init__(f"{where}: {what}; {what_to_do}")
        self.what = what
        self.where = where
        self.what_to_do = what_to_do
