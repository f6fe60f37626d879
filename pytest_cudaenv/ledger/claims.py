"""What a skip claims to lack, where its words claim that and nothing else; pure functions of text.

`skips` explains every skip as well as it can. Whether a runner that promises something may skip for want of it is
decided on less: the whole sentence must be a claim. "Needs 2 GPUs" is one; "too slow on a GPU" mentions a GPU, and is
none.
"""

from __future__ import annotations

import re
from functools import lru_cache

from pytest_cudaenv.ledger.conditions import read_whole_condition
from pytest_cudaenv.ledger.skip_needs import CAPABILITIES, DISTRIBUTIONS, missing_import, needs
from pytest_cudaenv.requirements.requirement import Requirement

_LONGEST = 200
"""Characters of a sentence that says no more than what it lacks."""


def _any(*names: str) -> str:
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


_NEWER = r"(?: ?\+| (?:or|and) (?:newer|higher|later|above|better))?"
_DEVICES = (
    r"(?:(?:\d+|one|two|three|four|eight|sixteen)\+? ?x? )?(?:(?:cuda|nvidia|visible|available|physical|local|or more"
    rf"|multi|multiple|several)[- ])*(?:cuda|gpus?|devices?|accelerators?|{_any(*CAPABILITIES)})(?: gpus?| devices?)?"
    + _NEWER
)
_CAPABILITY = (
    rf"(?:cuda )?(?:compute )?capability (?:>=? ?|≥ ?)?(?:of )?(?:at least )?\(?\d+(?:[.,] ?\d)?\)?{_NEWER}"
    rf"|sm[ _]?\d+a?{_NEWER}"
)
_MEMORY = r"\d+(?:\.\d+)? ?(?:gib|gb|g)(?: of)?(?: (?:gpu|device|cuda) memory| vram)"
_DTYPE = r"(?:native )?(?:bf16|bfloat16|fp16|float16|fp8|float8|fp4|nvfp4|tf32)"
_ATTENTION = r"(?:(?:flash|flex)[-_ ]?att(?:entio)?n(?:[-_ ]?(?:v|version )?[234])?|fa-?[234])(?: package| library)?"
_PACKAGE = rf"(?:the )?[`']?(?:{_any(*DISTRIBUTIONS)})[`']?(?: (?:package|library|module))?(?: ?[<>=~]=? ?v?\d[\d.]*)?"
_NAMED = r"(?:the )?[`']?[a-z][\w.-]*[`']? (?:package|library|module)"

_ONE = rf"(?:an? |the )?(?:{_CAPABILITY}|{_MEMORY}|{_DEVICES}|{_DTYPE}|{_ATTENTION}|{_PACKAGE}|{_NAMED}|nccl)"
_AND = r"(?: ?[,&+] ?| and | with |, and )"
_LEAST = rf"(?:at least |a minimum of |more than |>=? ?|≥ ?)?{_ONE}"
_THINGS = rf"{_LEAST}(?:{_AND}{_LEAST})*"

_HERE = r"(?: (?:on|by) (?:this|the) (?:host|machine|system|runner|platform|gpu|device|hardware))"
_FOR = r"(?: to (?:run|execute)(?: this(?: test)?)?| for this test)?"
_HAVE = (
    r"(?:[,;:]? ?\(?(?:but )?(?:only )?(?:found|got|have|has)(?: only)? (?:\d+|none|no gpus?)(?: gpus?| devices?)?"
    r"(?: available| found)?\)?|[,;:]? ?\(?(?:but )?(?:only )?\d+(?: gpus?| devices?)? (?:available|found)\)?)?"
)
_SKIP = r"(?:skip(?:ped|ping)?[:,]? (?:because |as |since |if |when )?)?"
_TEST = rf"{_SKIP}(?:(?:this |the |these )?tests? |it )?"
_ABSENT = r"(?:available|found|detected|installed|present|visible|importable)"
_VERB = (
    r"(?:requires?|requiring|needs?|only runs? (?:on|with)|runs? only (?:on|with)|can only (?:be )?run (?:on|with)"
    r"|must (?:be )?run (?:on|with))"
)

_CLAIMS = tuple(
    re.compile(sentence, re.I)
    for sentence in (
        # Test requires at least 2 GPUs to run, but only 1 found
        rf"{_TEST}{_VERB} {_THINGS}(?: (?:to be )?(?:installed|available)| support)?{_FOR}{_HAVE}",
        # 2 GPUs are required; CUDA is not available
        rf"{_SKIP}{_THINGS} (?:(?:is |are |was )?(?:required|needed|unavailable|missing|not (?:currently )?{_ABSENT})"
        rf"|(?:isn't|aren't) {_ABSENT}){_HERE}?{_FOR}{_HAVE}",
        r"[`']?[a-z][\w.-]*[`']? (?:is )?not installed",
        # Of a device alone it would say the opposite, and without the host it is said of a model.
        rf"{_SKIP}(?:{_DTYPE}|{_ATTENTION}) (?:is |are )?(?:not supported|unsupported){_HERE}",
        # no GPU available; cannot run without CUDA; fewer than 2 GPUs
        rf"{_SKIP}(?:cannot run )?(?:no|not enough|insufficient|too few|fewer than|less than|without|missing) "
        rf"{_ONE}(?:{_AND}{_ONE})*(?: (?:is |are |was )?{_ABSENT})?{_HERE}?{_HAVE}",
        r"(?:cuda|nvidia|gpu|cuda gpu|nvidia gpu)[- ]only",
    )
)


@lru_cache(maxsize=4096)
def claimed(text: str) -> Requirement | None:
    """What a skip's words claim to lack; None where they say anything else, or leave a doubt."""
    text = " ".join(text.split()).rstrip(".! ")
    if (condition := text.removeprefix("condition: ")) != text:
        return read_whole_condition(condition)
    if (requirement := missing_import(text)) is not None:
        return requirement
    if len(text) > _LONGEST or not any(claim.fullmatch(text) for claim in _CLAIMS):
        return None
    return needs(text)
