"""Attention is computed as two products with a softmax between."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import FOUR_DIMS, edit, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.hardware.environment import Environment

SOFTMAX = ("aten::_softmax", "aten::softmax")


@dataclass(frozen=True, kw_only=True)
class AttentionByHand(ScriptCheck):
    """Attention is computed as two products with a softmax between.

    ``scaled_dot_product_attention`` computes the three in one kernel, which never writes the matrix of weights to memory.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """

    least: float = 0.05
    """Share of a step, from which on it is reported."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """Four-dimensional softmax between batched products, and models of transformers with ``eager`` attention."""
        total = sum(operator.ms for operator in subject.operators)
        eager = [module for module in subject.modules if module.attention == "eager"]
        fused = any(
            "scaled_dot_product" in operator.name or "flash_attention" in operator.name for operator in subject.operators
        )
        softmax = [each for each in subject.operators if each.name in SOFTMAX and FOUR_DIMS.search(each.shapes)]
        products = [each for each in subject.operators if each.name == "aten::bmm"]
        by_hand = bool(softmax and products) and not fused
        time = share(subject, "forward", "backward")
        taken = time * sum(each.ms for each in (*softmax, *products)) / total if by_hand and total else 0.0
        if not eager and taken < self.least:
            return []
        where = next((each.site for each in softmax if each.site), None)
        how = 'attn_implementation="sdpa"' if eager else "torch.nn.functional.scaled_dot_product_attention"
        calls = sum(each.calls for each in softmax)
        name = f"{eager[0].name} computes" if eager else "The model computes"
        message = (
            f"{name} attention by hand, {calls:.0f} softmaxes between two products per step, {taken:.0%} of its time. Use "
            f"{how}."
        )
        return [
            self.note(
                message,
                evidence={"attention_share": taken, "softmaxes_per_step": calls, "eager": bool(eager)},
                where=where,
                category="step",
                edit=edit(subject, where, f"Replace the products and the softmax by {how}."),
                share=taken or None,
            )
        ]
