"""Put a network of the user's own in the place of the model."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.technique import Pass
from trimtab.errors import CompileError
from trimtab.passes.common.structure import difference
from trimtab.tensors.deepcopy import copied


@dataclass(frozen=True, kw_only=True)
class Student(Pass):
    """Take ``Workload(student=...)``, a smaller network of the user's own, instead of the model.

    Pays off where another architecture does the same work, such as one without recurrence or with fewer layers of another form,
    which pruning cannot reach. Its outputs must have the shapes of the model's, and are useless until ``recover`` has
    trained it to follow the model (knowledge distillation), which takes more updates than for a pruned network, because it does
    not start from the model's weights. It cannot pay if it is as slow as the model, which is timed before it is trained.
    Source: Hinton et al. 2015, https://arxiv.org/abs/1503.02531
    """

    words = "the student"
    exact = False  # it is another network
    compresses = True

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a student."""
        if candidate.student is None:
            return "student needs a smaller network of your own: give the workload student=..., a module or a function."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The student with its weights as they were given."""
        if candidate.student is None:
            raise CompileError(str(self.why_not(candidate)))
        try:
            model = copied(candidate.student)
        except MODEL_ERRORS as error:
            raise CompileError(f"The student cannot be copied: {error}. Make copy.deepcopy(student) work.") from error
        model.eval()
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"The student cannot stand where the model stands: {reason}.")
        return candidate.with_model(model)
