"""Reasons that the words of a skip give and no requirement says: other hardware, opt-ins, defects, cases not meant."""

from __future__ import annotations

import re

from pytest_cudaenv.ledger.vendors import vendor_reason
from pytest_cudaenv.requirements.reason import Rank, Reason, brief, quoted

OWN = Rank.SUITE

ALWAYS = Reason(
    "skip-always",
    "needs the suite to stop skipping it",
    "a skip without condition",
    "It runs nowhere: mend it, or delete it.",
    OWN,
)
"""`@unittest.skip`, `@pytest.mark.skip`, or a first statement that skips."""

NOT_APPLICABLE = Reason(
    "skip-not-applicable",
    "needs another case",
    "one that it is not for",
    "By its own words it is not for this model or these parameters; do not generate the case.",
    OWN,
)
NO_PARAMETERS = Reason(
    "skip-no-parameters",
    "needs parameters",
    "an empty list",
    "Its list of parameters is empty here: nothing was tested.",
)
KNOWN_ISSUE = Reason(
    "skip-known-issue",
    "needs a defect mended",
    "a skip instead",
    "As a strict xfail with its issue it would tell when the defect is gone.",
    OWN,
)
NETWORK = Reason(
    "skip-network",
    "needs the network or credentials",
    "none",
    "Give the runner access, a token, or a filled cache.",
)
DATA = Reason("skip-data", "needs a file or checkpoint", "none", "Put it where the test looks for it.")
LAUNCHER = Reason("skip-launcher", "needs a launcher with ranks", "none", "Run it under torchrun, as it says.")
MEMORY = Reason(
    "skip-memory",
    "needs more free device memory",
    "less",
    "Declare memory=, and it waits for a device that has it.",
)
CPU_ONLY = Reason("cuda-present", "needs a host without a GPU", "one", "Run it on a runner without a GPU.")
TOO_MANY = Reason(
    "cuda-too-many",
    "needs one CUDA device",
    "more",
    "Grant it one: a device test sees exactly what it is granted.",
)

OTHER_DEVICE = Reason(
    "cuda-unsupported",
    "needs another kind of CUDA device",
    "this one",
    "Its text does not say which; run it on others.",
)


def _words(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(rf"\b(?:{phrase})(?!\w)" for phrase in phrases), re.I)


_NOT = r"(?:does|do|is|are|has|have|was|can)(?:n't| not)"

_VENDORS = (
    ("rocm", r"rocm|hip|amd|mi\d{3}x?|gfx\d+|cdna"),
    ("xpu", r"xpus?|intel gpus?"),
    ("hpu", r"hpus?|gaudi\d?|habana"),
    ("npu", r"npus?|ascend"),
    ("tpu", r"tpus?"),
    ("neuron", r"neuron\w*|trainium|inferentia"),
    ("mps", r"mps|apple silicon|apple gpu|metal"),
    ("mlu", r"mlus?"),
    ("musa", r"musa"),
    ("sdaa", r"sdaa"),
    ("xla", r"torch_?xla|xla"),
)


def vendor(text: str) -> Reason | None:
    """Other hardware that is needed, or that cannot do it; None where CUDA would do as well."""
    for name, words in _VENDORS:
        if not re.search(rf"\b(?:{words})\b", text, re.I):
            continue
        if re.search(rf"\bnon[- ]?(?:{words})\b", text, re.I):
            return vendor_reason(f"non-{name}")
        cannot = r"(?:support\w*|work\w*|implemented|available|compatible|run)?"
        against = (
            rf"\b(?:not|n't|un)\s?(?:\w+ )?{cannot} ?(?:on|for|with|by)"
            rf" (?:the )?(?:{words})\b|\b(?:skip\w*|fails?|hangs?|broken|except) (?:on|for) (?:the )?(?:{words})\b"
            rf"|\b(?:{words}) (?:\w+ )?{_NOT} support"
        )
        if re.search(against, text, re.I):
            return vendor_reason(f"non-{name}")
        rest = re.sub(r"\b(?:amd|rocm|intel|apple)\b(?: \w+)? gpus?", "", text, flags=re.I)
        if re.search(r"\b(?:cuda|nvidia|gpus? or|or (?:a )?gpus?)\b", rest, re.I):
            return None
        return vendor_reason(name)
    return None


def broken_import(text: str) -> Reason | None:
    """pytest.importorskip's text: an import that fails for another reason than absence is broken, not missing."""
    found = re.match(r"could not import '([\w.]+)': (.+)", text)
    if found is None:
        return None
    top, error = found[1].partition(".")[0], found[2]
    if re.match(rf"(?:ModuleNotFoundError: )?No module named '{re.escape(top)}(?:\.|')", error):
        return None
    remedy = f"It is installed and its import fails with `{error}`; reinstall it for this torch and Python."
    return brief("package-broken", f"needs {top}", quoted(error), remedy, Rank.BROKEN)


_VARIABLE = re.compile(r"\b((?!CUDA_|HF_TOKEN|HUGGING_FACE_HUB_TOKEN)[A-Z][A-Z0-9]*_[A-Z0-9_]+)\b(?!\()")
_OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]+)")
_ASKS = _words(
    "set", "use", "pass", "specify", "export", "run with", "enable", "needs?", "requires?", "not set", "unset"
)
_OPT_IN = _words(
    "slow",
    "tooslow",
    "too slow",
    "nightly",
    "expensive",
    "long[- ]running",
    "manual(?:ly)?",
    "CI",
    "staging",
    "opt[- ]?in",
    "custom tokenizers",
)


def asked_for(text: str) -> Reason | None:
    """A variable or option that switches the test on, whatever it needs then."""
    named = _VARIABLE.search(text) or _OPTION.search(text)
    return opt_in(text) if named and _ASKS.search(text) else None


def opt_in(text: str) -> Reason | None:
    """A test that runs where somebody asks for it."""
    asked = (_VARIABLE.search(text) or _OPTION.search(text)) if _ASKS.search(text) else None
    if not asked and not _OPT_IN.search(text) and not re.match(r"test is (?:an? )?\w+[\w ]* test$", text):
        return None
    need = asked[1] if asked else "RUN_SLOW" if text == "test is slow" else "to be asked for"
    return brief("skip-opt-in", f"needs {need}", "not asked for", "Ask for it where it should run.", OWN)


def system(text: str) -> Reason | None:
    """Another operating system, Python, or more of the host's memory."""
    if IS_OF_THE_SYSTEM.search(text):
        return brief("host-os", "needs another operating system", "this one", "Run it on one.")
    if found := re.search(r"\bpython\s*(?:version)?\s*((?:>=|<=|==|<|>)?\s*3\.\d+)", text, re.I):
        return brief("host-python", f"needs Python {found[1]}", "another", "Run it with that Python.")
    if re.search(r"\bat least \S+ (?:cpus|cpu cores|cores)\b", text, re.I):
        return brief("host-cpus", "needs more CPU cores", "fewer", "Run it on a runner with as many.")
    if re.search(r"\b(?:cpu|host|system) (?:ram|memory)\b|\bram\b", text, re.I):
        return brief("host-memory", "needs more host memory", "less", "Run it on a runner with more memory.")
    return None


IS_OF_THE_SYSTEM = _words("windows", "mac ?os", "darwin", "linux", "win32", "posix")
IS_KNOWN_ISSUE = _words(
    "flaky",
    "hangs?",
    "broken",
    "bugs?",
    "buggy",
    "fails?",
    "failing",
    "todo",
    "fixme",
    "regression",
    "unstable",
    r"deprecat\w+",
    "disabled",
    r"temporar\w+",
    "not working",
    "(?:does|do)(?:n't| not) work",
    r"investigat\w+",
    r"crash\w*",
    r"segfaults?",
    "non-?deterministic",
    "known issue",
    "tracked (?:in|by|at)",
    "needs? (?:a |to be )?fix(?:ed)?",
    "fix (?:me|this|it)",
    "don't work with",
)
RAN_OUT = _words("out of memory", "oom")
IS_OUT_OF_MEMORY = _words(r"(?:not enough|insufficient|low) (?:\w+ )?(?:memory|vram)")
IS_CPU_ONLY = re.compile(
    r"(?<!got )(?<!have )(?<!found )(?<!is )\bcpu[- ]only\b(?! (?:build|torch|wheel|install))"
    r"|\bonly (?:\w+ ){0,3}on (?:the )?cpu\b"
    r"|\brequires? (?:only )?(?:a |the )?cpu\b(?! ram| memory)",
    re.I,
)
IS_OF_THIS_DEVICE = re.compile(
    r"\b(?:on|by|for) (?:this|the current|your|current) (?:\w+ )?(?:gpus?|devices?|hardware|card|platform|arch\w*)\b",
    re.I,
)
IS_ONE_DEVICE = re.compile(r"\b(?:exactly|only|single)\b.{0,12}\b(?:gpu|device|accelerator)\b", re.I)
IS_TOO_MANY = re.compile(r"\bskip\w* (?:on|for|with) multi[- ]?(?:gpu|device|accelerator)", re.I)

_MODEL = (
    r"(?:models?|processors?|tokenizers?|architectures?|submodels?|backbones?|optimizers?|heads?|encoder|decoder"
    r"|testers?|\w+(?:Model|Processor|Tokenizer|Backbone|Config|LM))"
)
_CANNOT = (
    rf"(?:{_NOT}|has no|have no|without|cannot|can't|only supports?|only has|supports? only|neither|unsupported"
    r"|not (?:support|have|use|yet|configured|an? ))"
)
_IS_OF_THE_CASE = re.compile(
    rf"\b{_MODEL}\b[^.;]*\b{_CANNOT}|\b{_NOT} (?:support|have|use|accept|count|expose) [^.;]*\b{_MODEL}\b"
    rf"|^`?[\w.]+`? {_NOT} (?:support|have|accept|use) ",
    re.I,
)
_IS_OF_THE_HOST = _words(
    "windows",
    "mac ?os",
    "linux",
    "system",
    "device",
    "gpu",
    "cuda",
    "hardware",
    "platform",
    "card",
    "installed",
    "cpu",
    "driver",
    "runner",
)


def is_about_the_case(text: str) -> bool:
    """A model, tokenizer or processor that does not do something is no matter of the host, whatever it is."""
    return _IS_OF_THE_CASE.search(text) is not None and _IS_OF_THE_HOST.search(text) is None


LAST: tuple[tuple[re.Pattern[str], Reason], ...] = (
    (
        _words(
            "network",
            "internet",
            "offline",
            "connect(?:ion|ed)?",
            "timed? ?out",
            r"download\w*",
            "HF_TOKEN",
            "gated",
            r"credentials?",
            "api key",
            "rate limit",
            "http error",
            "unreachable",
            r"authenticat\w+",
            "(?:access|hub|auth) token",
            "from the hub",
            r"could not (?:find or )?load .{1,80} from \S+/\S+",
        ),
        NETWORK,
    ),
    (
        _words(
            "torchrun",
            "world[_ ]?size",
            "mpirun",
            "launcher",
            r"rank \d",
            r"distributed (?:is )?not (?:available|init\w+)",
            "process group",
            r"at least \d+ (?:\w+ )?(?:workers|ranks|processes)",
        ),
        LAUNCHER,
    ),
    (
        _words(
            "(?:data|datasets?|files?|checkpoints?|weights|fixtures?|images?|audio|assets?) (?:file )?(?:is |are )?"
            "(?:not (?:found|available|present|downloaded|there)|missing|unavailable)",
            "no such file",
            "missing (?:file|data|checkpoint)s?",
            "(?:file|path|folder|directory) does(?:n't| not) exist",
        ),
        DATA,
    ),
    (
        _words(
            "not (?:yet )?(?:applicable|relevant|supported|implemented|valid|compatible|needed|meaningful|designed)",
            "unsupported",
            "incompatible",
            "n/a",
            r"(?:does|do)(?:n't| not) \w+",
            r"skip(?:ping|ped|s)? .{0,60}\bfor (?!now\b|the (?:moment|time))\w+",
            "because of no",
            "exempted",
            "separate test",
            "(?:is|are) skipped",
            "no longer exists?",
            r"only (?:\w+ ){0,2}(?:applicable|supported)",
            "redundant",
            "irrelevant",
            "is (?:set to )?`?(?:false|none)`?$",
            "already (?:tested|covered)",
            "covered by",
            r"duplicated?",
            "cannot",
            r"(?:less|fewer) than (?:two|\d)",
            "only (?:for|with|when|supports?|applies|valid|relevant)",
            "has no",
            "not an?",
            "nothing to",
            r"could not (?:find|locate|determine)",
            r"^no \w+",
            "not configured",
            "not in",
            "not present",
            "not enabled for",
            "should not run",
            "neither",
            "already in",
        ),
        NOT_APPLICABLE,
    ),
)
"""Words -> their reason; the first that fits, once nothing else did."""
