"""Needs that the words of a skip spell, as requirements: devices, capability, memory, dtypes, attention, packages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from pytest_cudaenv.requirements.markers import requires_attn_backend, requires_cuda, requires_dtype
from pytest_cudaenv.requirements.packages import parse_package
from pytest_cudaenv.requirements.requirement import Requirement

_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}
_NUMBER = rf"(\d+|{'|'.join(_NUMBERS)})"
_DEVICES = r"(?:gpus?|devices?|accelerators?)"
_ADJECTIVES = (
    r"(?:(?:cuda|nvidia|physical|visible|available|hopper|blackwell|[abh]\d00s?|local|fsdp|data[- ]parallel|accelerator"
    r"|gpu|different|separate|free|or more|hardware|nvlink)[ -])*"
)
_COUNTED = r"\b(?:gpus?|devices?|device_count\(\)|num_gpus|ngpus?|gpu count)"
_SEVERAL = "|".join(
    (
        rf"\bmulti[- ]?{_DEVICES}\b",
        rf"\bmultiple (?:\w+ )?{_DEVICES}\b",
        rf"\bmore than (?:one|1|a single) (?:\w+ )?{_DEVICES}\b",
        rf"\b(?:not enough|insufficient|too few) (?:number of )?(?:\w+ )?{_DEVICES}\b",
        rf"\bseveral {_DEVICES}\b",
    )
)

CAPABILITIES = {
    "volta": (7, 0), "v100": (7, 0), "turing": (7, 5), "t4": (7, 5), "ampere": (8, 0), "a100": (8, 0), "a10g": (8, 6),
    "ada lovelace": (8, 9), "ada": (8, 9), "l40s": (8, 9), "l40": (8, 9), "l4": (8, 9), "hopper": (9, 0),
    "h100": (9, 0), "h200": (9, 0), "gh200": (9, 0), "blackwell": (10, 0), "b100": (10, 0), "b200": (10, 0),
    "gb200": (10, 0), "gb300": (10, 3),
}  # fmt: skip
"""Architectures and devices that skips name -> the lowest capability that the name covers."""

_NAMED = "|".join(sorted(CAPABILITIES, key=len, reverse=True))
_ONLY = re.compile(r"\b(?:only|exactly)\b", re.I)


def _number(text: str) -> int:
    return _NUMBERS.get(text.lower()) or int(text)


def devices(text: str) -> Requirement | None:
    """`at least 2 GPUs`, `4 x H100`, `device_count() < 2`, `multiple GPUs`."""
    counts = []
    for m in re.finditer(rf"(more than )?\b{_NUMBER}\+?\s*{_ADJECTIVES}{_DEVICES}\b", text, re.I):
        counts.append(_number(m[2]) + bool(m[1]))
    counts += [_number(m[1]) for m in re.finditer(rf"\b{_NUMBER}\s?x\s*(?:{_NAMED}|gpus?)\b", text, re.I)]
    counts += [int(m[1]) for m in re.finditer(rf"{_COUNTED}\s*(?:>=|≥|==|=|<)\s*(\d+)", text, re.I)]
    counts += [int(m[1]) + 1 for m in re.finditer(rf"{_COUNTED}\s*(?:>|<=)\s*(\d+)", text, re.I)]
    counts += [int(m[1]) for m in re.finditer(r"\bgpus\b.*?\b(\d+) required", text, re.I)]
    if re.search(_SEVERAL, text, re.I):
        counts.append(2)
    wanted = [count for count in counts if 1 <= count <= 1024]
    return Requirement(devices=max(wanted)) if wanted else None


_LOW = re.compile(r"capability.*<\s*\(?(\d{1,2})[.,]\s*(\d)", re.I)
_AT_LEAST = re.compile(r"(?:capability|\bcc|\bsm)\s*(?:\w+ ){0,3}?(?:>=|≥|>|==|=|:)?\s*\(?(\d{1,2})[.,]\s*(\d)", re.I)
_SM = re.compile(r"\bsm[_ ]?(\d{1,2})(\d)a?\+?(?!\d)", re.I)
_SHORT = re.compile(r"capability\s*(?:>=|≥|at least|of)?\s*(\d{1,2})(\d)(?![\d.])", re.I)
_MAJOR = re.compile(r"capability\s*(?:>=|≥|at least|of)\s*(\d{1,2})(?![\d.,])", re.I)


def capability(text: str) -> Requirement | None:
    """`capability >= 8.9`, `sm90`, `capability 90`, `Hopper`, `H100 only`."""
    if found := _LOW.search(text) or _AT_LEAST.search(text):
        return _from((int(found[1]), int(found[2])))
    if found := _SHORT.search(text):
        return _from((int(found[1]), int(found[2])))
    if found := _MAJOR.search(text):
        return _from((int(found[1]), 0))
    exact = [(int(m[1]), int(m[2])) for m in _SM.finditer(text)]
    named = [CAPABILITIES[m[1].lower()] for m in re.finditer(rf"\b({_NAMED})s?\b", text, re.I)]
    if not exact and not named:
        return None
    # "Hopper or Blackwell": the lowest will do. "Hopper only": nor will what follows.
    highest = max(exact + named)
    below = (highest[0], highest[1] + 1) if not named else (highest[0] + 1, 0)
    return _from(min(exact + named), below if _ONLY.search(text) else None)


def _from(lowest: tuple[int, int], below: tuple[int, int] | None = None) -> Requirement:
    upper = f",<{below[0]}.{below[1]}" if below else ""
    return requires_cuda(capability=f">={lowest[0]}.{lowest[1]}{upper}")


def memory(text: str) -> Requirement | None:
    """`40GB of GPU memory`; not what is said of the host's."""
    found = re.search(r"\b(\d+(?:\.\d+)?)\s*(GiB|GB|G)\b", text, re.I)
    if found is None or not re.search(r"memory|vram|gpu|device|card|cuda", text, re.I) or is_of_host_memory(text):
        return None
    unit = "GiB" if found[2].lower() == "gib" else "GB"
    return requires_cuda(memory=f"{found[1]}{unit}") if float(found[1]) > 0 else None


def is_of_host_memory(text: str) -> bool:
    """Whether the words are about the memory of the host."""
    return re.search(r"\b(?:cpu|host|system) (?:ram|memory)\b", text, re.I) is not None


_DTYPES = (
    (r"bf16|bfloat16", "bfloat16"),
    (r"fp8|float8\w*|e4m3\w*|e5m2\w*", "fp8"),
    (r"nvfp4|fp4", "fp4"),
    (r"tf32|tensorfloat-?32", "tf32"),
    (r"fp16|float16|half[- ]precision", "float16"),
)
_WANTED = re.compile(r"requir|need|support|availab|without|lack|\bno\b|\bnot\b|native", re.I)


def dtypes(text: str) -> Requirement | None:
    """`bfloat16 is not supported on this device`."""
    names = [name for words, name in _DTYPES if re.search(rf"\b(?:{words})\b", text, re.I)]
    return requires_dtype(*names) if names and _WANTED.search(text) else None


def attention(text: str) -> Requirement | None:
    """`flash_attn not installed`, `FA3`, `FlexAttention`."""
    if re.search(r"\bflex[-_ ]?attention\b", text, re.I):
        return requires_attn_backend("flex_attention")
    words = r"\bflash[-_ ]?att(?:entio)?n(?:[-_ ]?(?:v|version )?([234])\b)?|\bfa-?([234])\b"
    found = re.search(words, text, re.I)
    return requires_attn_backend(f"flash_attention_{found[1] or found[2] or 2}") if found else None


def nccl(text: str) -> Requirement | None:
    """NCCL, whatever is said of it."""
    return Requirement(devices=1, nccl=True) if re.search(r"\bnccl\b", text, re.I) else None


def driver(text: str) -> Requirement | None:
    """`CUDA >= 12.4`: at the latest the driver has to know it."""
    words = r"\bcuda\s*(?:version|toolkit|runtime|driver)?\s*(?:>=|≥|>)?\s*(\d{2})\.(\d{1,2})\b"
    found = re.search(words, text, re.I)
    return requires_cuda(driver=f">={found[1]}.{found[2]}") if found else None


def any_device(text: str) -> Requirement | None:
    """A device at all: words that mention one, or what the CPU cannot do."""
    mentioned = r"\bcuda\b|\bgpus?\b|\bnvidia\b|\baccelerators?\b|\bcudnn\b|\bcublas\b|\bcuda_\w+"
    on_cpu = r"\bon (?:the )?cpu\b|\bcpu\b.*\b(?:un|not )support|\bnot? (?:\w+ )?(?:for|support\w*) (?:the )?cpu\b"
    return Requirement(devices=1) if re.search(f"{mentioned}|{on_cpu}", text, re.I) else None


_SAME = """
accelerate apex aqlm av bitsandbytes datasets decord deepspeed diffusers eetq einops executorch gptqmodel hqq
kernels librosa megablocks mistral-common nltk numpy nvfuser onnx onnxruntime optimum optuna pandas peft ray scipy
sentencepiece soundfile tensorboard tensorrt tiktoken timm tokenizers torch torchao torchaudio torchcodec
torchvision transformers triton vllm wandb xformers
"""

DISTRIBUTIONS = {name: name for name in _SAME.split()} | {
    "pytorch": "torch", "flash_attn": "flash-attn", "cv2": "opencv-python", "pil": "pillow", "sklearn": "scikit-learn",
    "yaml": "pyyaml", "bnb": "bitsandbytes", "transformer engine": "transformer-engine", "deep_gemm": "deep-gemm",
    "transformer_engine": "transformer-engine", "transformerengine": "transformer-engine", "faiss": "faiss-cpu",
    "flashinfer": "flashinfer-python", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d",
    "liger": "liger-kernel",
    "liger_kernel": "liger-kernel", "torch_geometric": "torch-geometric", "lightning": "lightning",
}  # fmt: skip
"""Names by which skips call packages, and their modules -> distribution."""

_PACKAGES = "|".join(re.escape(name) for name in sorted(DISTRIBUTIONS, key=len, reverse=True))
_NOT_PACKAGES = re.compile(
    r"cuda|cudnn|gpus?|devices?|capability|sm|memory|ram|vram|size|python|version|\w*_size|nccl|it|not|this|that|any"
    r"|device_count|num_gpus|ngpus?|which|are|is|be|tests?|and|or|toolkit|driver|necessary|required|latest|correct|same"
    r"|files?|data|datasets?|models?|checkpoints?|weights|images?|binary|compiler|commands?|executable|kernels?|modules?"
    r"|paths?|support|features?|extensions?|ops?|library|libraries|packages?|token|tokens|config|requires?|needs?|at|least|right|third|party|optional|additional|following|these|those|a|an|the",
    re.I,
)
_OPPOSITE = {"<": ">=", "<=": ">"}
_ABSENT = r"(?:is |are |was )?(?:not|isn't|aren't) (?:be )?(?:installed|found|importable|imported)\b"
_LIBRARY = r"(?:library|package|module|to be installed|installed)\b"
_NAME = r"([A-Za-z][\w.-]*)"


def packages(text: str) -> Requirement | None:
    """`requires torch>=2.6`, `flashinfer is not installed`, `torch 2.6 or newer`, `needs the xyz library`."""
    asked = re.search(r"requir|need", text, re.I) is not None
    specs = []
    for m in re.finditer(rf"{_NAME}`?\s*(?:version\s*)?(>=|==|<=|<|>)\s*`?v?(\d+(?:\.\d+)*)", text):
        if m[2] == "==" and not re.search(r"(?:requires?|needs?)\s+$", text[: m.start()], re.I):
            continue  # "currently (torch==2.5) broken": when, and not what for
        if "." not in m[3] and m[1].lower() not in DISTRIBUTIONS:
            continue  # "groups>1": no package that anybody knows
        # "torch < 2.5" without a verb tells what is wrong, not what is wanted.
        specs.append(_spec(m[1], f"{m[2] if asked else _OPPOSITE.get(m[2], m[2])}{m[3]}"))
    newer = r"(?:\+|or (?:newer|higher|later|above|greater))"
    for m in re.finditer(rf"\b({_PACKAGES})`?\s+(?:version\s+)?v?(\d+(?:\.\d+)+)\s*{newer}", text, re.I):
        specs.append(_spec(m[1], f">={m[2]}"))
    for pattern in (
        rf"`?'?{_NAME}'?`? (?:\w+ )?{_ABSENT}",
        r"no module named '?([A-Za-z][\w.]*)",
        rf"(?:requires?|needs?|without|install)\s+(?:the\s+)?`?{_NAME}`? {_LIBRARY}",
    ):
        specs += [_spec(m[1]) for m in re.finditer(pattern, text, re.I)]
    for m in re.finditer(r"packages?(?:\(s\))? \[([^\]]+)\]", text, re.I):
        specs += [_spec(name) for name in re.findall(r"[\w.-]+", m[1])]
    if not any(specs):
        known = rf"`?({_PACKAGES})`?(?![\w.-])(?!\s+(?:methods?|models?|configs?|adapters?)\b)"
        before = rf"\b(?:requires?|needs?|without|missing|install)\s+(?:the\s+)?{known}"
        absent = r"(?:required|needed|missing|unavailable|not available)\b"
        after = rf"(?<![\w.-]){known}\s*(?:backend|library|package|support)?\s*(?:is|are)?\s*{absent}"
        for pattern in (before, after):
            specs += [_spec(m[1]) for m in re.finditer(pattern, text, re.I)]
    found = tuple(dict.fromkeys(spec for spec in specs if spec))
    return Requirement(packages=found) if found else None


def _spec(name: str, version: str = "") -> str | None:
    """The PEP 508 string of a package as a skip calls it; None for a word that is no package."""
    name = name.strip(".-_")
    if not name or _NOT_PACKAGES.fullmatch(name):
        return None
    distribution = DISTRIBUTIONS.get(name.lower()) or name.partition(".")[0]
    try:
        return parse_package(f"{distribution}{version}")
    except ValueError:
        return None


def missing_import(text: str) -> Requirement | None:
    """The text of `pytest.importorskip`, for a module that is absent or too old."""
    absent = re.match(r"could not import '([\w.]+)'", text)
    old = re.match(r"module '([\w.]+)' has __version__ .*required is: '([\w.]+)'", text)
    if absent is None and old is None:
        return None
    spec = _spec(absent[1]) if absent else _spec(old[1], f">={old[2]}") if old else None
    return Requirement(packages=(spec,)) if spec else None


NEEDS: tuple[Callable[[str], Requirement | None], ...] = (
    devices, capability, memory, dtypes, attention, driver, nccl, packages,
)  # fmt: skip


def needs(text: str) -> Requirement | None:
    """All that the words ask for, merged; None if they ask for nothing that is known."""
    merged: Requirement | None = None
    for need in NEEDS:
        if (read := need(text)) is not None:
            merged = read if merged is None else merged.merged(read)
    if merged is None or not (merged.devices or merged.packages):
        read = None if is_of_host_memory(text) else any_device(text)
        if read is not None:
            merged = read if merged is None else merged.merged(read)
    if merged is not None and merged.attn_backends:  # says the same, and more
        packages_left = tuple(spec for spec in merged.packages if not spec.startswith("flash-attn"))
        merged = replace(merged, packages=packages_left)
    return merged
