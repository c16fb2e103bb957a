"""What a study tells about its progress. The base class keeps silent; the command line prints."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from trimtab.study.sampler import Ask
    from trimtab.study.study import Study
    from trimtab.trial import Trial

INTERRUPTED = "interrupted: finishing with the best so far; press Ctrl-C again to stop at once"


class Progress:
    """Called by a study as it goes; override what you want to show.

    Calls come from the thread that runs the study, :meth:`interrupted` from within a signal handler.
    """

    def stage(self, words: str) -> None:
        """The study has come to another stage of its work, in plain words."""

    def opened(self, study: Study) -> None:
        """The workload is sound and the study can begin; it may hold trials of an earlier run."""

    def remark(self, sentence: str) -> None:
        """Something that the user should know before the end."""

    def began(self, ask: Ask, finished: int) -> None:
        """A trial began after ``finished`` others."""

    def ended(self, trial: Trial, study: Study) -> None:
        """A trial ended and is kept."""

    def interrupted(self) -> None:
        """The first Ctrl-C came: the study ends cleanly with the best so far."""
        self.stage(INTERRUPTED)
