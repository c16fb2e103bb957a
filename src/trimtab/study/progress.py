"""What a study tells about its progress. The base class keeps silent; the command line prints."""

from __future__ import annotations

import typing

from trimtab.trial import Trial

if typing.TYPE_CHECKING:
    from trimtab.study.sampler import Ask
    from trimtab.study.study import Study


class Progress:
    """Called by a study as it goes; override what you want to show."""

    def stage(self, words: str) -> None:
        """The study has come to another stage of its work, in plain words."""

    def began(self, ask: Ask, finished: int) -> None:
        """A trial began after ``finished`` others."""

    def ended(self, trial: Trial, study: Study) -> None:
        """A trial ended and is kept."""
