"""Computes rates of programs that compile and that pass their tests, from the terms of their rewards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.objectives.pass_at_k import Rate, pass_at_k, rate_over
from asyncrl.rewards.templates import compiles, passes_tests, reaches

COMPILES = compiles.__name__
PASSES = passes_tests.__name__
"""Names of the terms, if `name` does not give them others: 1 if a program compiles; the share of its tests that it
passes."""
ENDS = ("low", "high")
Terms = Mapping[str, float]


def code_metrics(samples: Sequence[Terms]) -> dict[str, float]:
    """Computes `code/*` of the samples of one step; none where their rewards are not about programs."""
    compiled = [terms[COMPILES] for terms in samples if COMPILES in terms]
    passed = [reaches(terms[PASSES], 1.0) for terms in samples if PASSES in terms]
    return {
        **({"code/compile_rate": fmean(compiled)} if compiled else {}),
        **({"code/pass_rate": fmean(passed)} if passed else {}),
    }


@dataclass(frozen=True, slots=True)
class CodeRates:
    """The rates of held-out programs over problems. pass_at: by k, a power of two up to the samples of a problem."""

    compile_rate: Rate | None
    pass_at: dict[int, Rate]

    @classmethod
    def of(cls, problems: Sequence[Sequence[Terms]]) -> "CodeRates | None":
        """Computes the rates from the terms of each problem's samples; None where none are about programs."""
        compiled = [[terms[COMPILES] for terms in each if COMPILES in terms] for each in problems]
        passed = [[reaches(terms[PASSES], 1.0) for terms in each if PASSES in terms] for each in problems]
        rates = [fmean(each) for each in compiled if each]
        found = cls(rate_over(rates) if rates else None, dict(pass_rates([each for each in passed if each])))
        return found if found.compile_rate or found.pass_at else None

    def metrics(self) -> dict[str, float]:
        """Returns the rates by the names of their metrics."""
        found = {}
        if (compiled := self.compile_rate) is not None:
            found["eval/code/compile_rate"] = compiled.mean
            found |= {f"eval/code/compile_rate_{end}": getattr(compiled, end) for end in ENDS}
        for k, rate in self.pass_at.items():
            found[f"eval/code/pass_at_{k}"] = rate.mean
            found |= {f"eval/code/pass_at_{k}_{end}": getattr(rate, end) for end in ENDS}
        return found

    def __str__(self) -> str:
        named = {f"pass@{k}": rate for k, rate in self.pass_at.items()}
        if self.compile_rate is not None:
            named["compiles"] = self.compile_rate
        return ", ".join(f"{name} {rate.mean:.3f} [{rate.low:.3f} - {rate.high:.3f}]" for name, rate in named.items())


def pass_rates(problems: Sequence[Sequence[bool]]) -> Iterator[tuple[int, Rate]]:
    """Yields pass@k for each power of two that every problem has samples for."""
    k = 1
    while problems and k <= min(map(len, problems)):
        yield k, rate_over([pass_at_k(len(passed), sum(passed), k) for passed in problems])
        k *= 2
