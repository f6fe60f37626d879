"""What a skip claims to lack: a whole sentence that says that and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.ledger.claims import claimed
from pytest_cudaenv.ledger.contract import Contract, covers, read_promise
from pytest_cudaenv.ledger.skip_needs import missing_import, needs
from pytest_cudaenv.requirements.requirement import Requirement

CLAIMS = {
    "needs 2 GPUs": Requirement(devices=2),
    "Test requires at least 2 GPUs to run, but only 1 found": Requirement(devices=2),
    "requires multiple CUDA GPUs": Requirement(devices=2),
    "test requires multiple CUDA GPUs": Requirement(devices=2),
    "test requires CUDA": Requirement(devices=1),
    "test requires a CUDA device": Requirement(devices=1),
    "This test requires a GPU": Requirement(devices=1),
    "CUDA not available": Requirement(devices=1),
    "CUDA is not available.": Requirement(devices=1),
    "No CUDA device available": Requirement(devices=1),
    "no GPU": Requirement(devices=1),
    "GPU is required": Requirement(devices=1),
    "Requires CUDA": Requirement(devices=1),
    "Need at least 2 GPUs": Requirement(devices=2),
    "Need at least 4 GPUs to run this test": Requirement(devices=4),
    "Not enough GPUs": Requirement(devices=2),
    "requires compute capability >= 9.0": Requirement(devices=1, capability=(">=9.0",)),
    "Requires Hopper or newer": Requirement(devices=1, capability=(">=9.0",)),
    "requires H100": Requirement(devices=1, capability=(">=9.0",)),
    "Requires SM90": Requirement(devices=1, capability=(">=9.0",)),
    "test requires Flash Attention 3": Requirement(devices=1, attn_backends=("flash_attention_3",)),
    "test requires Flash Attention": Requirement(devices=1, attn_backends=("flash_attention_2",)),
    "flash_attn is not installed": Requirement(devices=1, attn_backends=("flash_attention_2",)),
    "requires flash_attn": Requirement(devices=1, attn_backends=("flash_attention_2",)),
    "bf16 is not supported on this device": Requirement(devices=1, dtypes=("bfloat16",)),
    "requires bf16 support": Requirement(devices=1, dtypes=("bfloat16",)),
    "requires 80GB of GPU memory": Requirement(devices=1, memory=80000000000),
    "Requires 2 GPUs with 80GB of GPU memory": Requirement(devices=2, memory=80000000000),
    "could not import 'flash_attn': No module named 'flash_attn'": Requirement(packages=("flash-attn",)),
    "could not import 'peft': libcudart.so.12: cannot open": Requirement(packages=("peft",)),
    "condition: torch.cuda.device_count() < 2": Requirement(devices=2),
    "requires NCCL": Requirement(devices=1, nccl=True),
    "CUDA only": Requirement(devices=1),
    "skipped because CUDA is not available": Requirement(devices=1),
    "needs at least 2 GPUs (found 1)": Requirement(devices=2),
    "multi-GPU required": Requirement(devices=2),
    "requires torch>=2.6": Requirement(packages=("torch>=2.6",)),
    "requires the packaging package": Requirement(packages=("packaging",)),
    "peft not installed": Requirement(packages=("peft",)),
    "test requires PEFT": Requirement(packages=("peft",)),
    "test requires multiple accelerators": Requirement(devices=2),
    "Only runs on CUDA": Requirement(devices=1),
    "cannot run without CUDA": Requirement(devices=1),
    "fewer than 2 GPUs available": Requirement(devices=2),
    "test requires bitsandbytes": Requirement(packages=("bitsandbytes",)),
    "FlashAttention not available": Requirement(devices=1, attn_backends=("flash_attention_2",)),
    "2 GPUs required, found 1": Requirement(devices=2),
    "Need 4 gpus, got 2": Requirement(devices=4),
}

NO_CLAIMS = [
    "too slow on GPU",
    "Not supported on GPU",
    "not available on GPU",
    "requires CUDA graphs",
    "requires CUDA or XPU",
    "does not require GPU",
    "no GPU needed",
    "requires no GPU",
    "needs less than 2 GPUs",
    "no more than one GPU",
    "at most one GPU",
    "test requires 0 or 1 GPU",
    "requires a single GPU",
    "exactly one GPU",
    "2 GPUs are available",
    "skip when GPU is available",
    "Skipping: GPU is available",
    "more than one GPU available",
    "bf16 not supported",
    "flash attention is not supported by this model",
    "model does not support flash attention",
    "test is slow",
    "needs RUN_SLOW",
    "requires CUDA and a launcher",
    "requires CPU",
    "CPU only",
    "flaky on 2 GPUs",
    "out of memory on GPU",
    "CUDA out of memory. Tried to allocate 20.00 GiB",
    "requires MPS",
    "broken on H100",
    "CUDA is not supported",
    "no GPU test",
    "runs only without GPU",
    "test without GPU",
    "requires internet access",
    "no CUDA support for this op",
    "single-GPU only",
    "GPU memory leak",
    "needs a GPU with no other process",
    "condition: torch.cuda.device_count() < 2 or True",
    "condition: torch.cuda.device_count() > 1",
    "needs fixing on CUDA",
    "CUDA version mismatch",
    "requires cuDNN",
    "needs 2 GPUs or a TPU",
    "unsupported GPU",
    "model needs 2 GPUs to be quick, skipping",
    "HF_TOKEN required",
    "GPU not found in config",
    "got empty parameter set",
    "peft is not installed on purpose",
    "",
    "x" * 100_000,
]


@pytest.mark.parametrize(("text", "requirement"), CLAIMS.items())
def test_a_sentence_that_claims_a_lack(text: str, requirement: Requirement) -> None:
    assert claimed(text) == requirement
    assert claimed(f"  {text}\n") == requirement


@pytest.mark.parametrize("text", NO_CLAIMS)
def test_a_sentence_that_says_something_else(text: str) -> None:
    assert claimed(text) is None


VOCABULARY = """
requires needs test no not available on for GPU GPUs CUDA 2 1 only at least flash_attn bf16 supported without installed
peft and or with this a device because slow more than less < >= 9.0 capability H100 XPU , ( )
"""
WORDS = st.sampled_from(VOCABULARY.split())


@given(st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=9).map(" ".join)))
def test_a_claim_is_what_every_reader_of_the_words_reads(text: str) -> None:
    claim = claimed(text)
    plain = " ".join(text.split()).rstrip(".! ")
    assert claim is None or claim == (missing_import(plain) or needs(plain))


# What a promise covers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promises", "claim", "denied"),
    [
        ("devices>=2", "needs 2 GPUs", "devices>=2"),
        ("devices>=2", "requires CUDA", "devices>=2"),
        ("devices>=2", "needs 4 GPUs", None),
        ("devices>=2", "requires H100", None),
        ("capability>=9.0", "requires H100", "capability>=9.0"),
        ("capability>=9.0", "requires compute capability >= 8.9", "capability>=9.0"),
        ("capability>=8.9", "requires compute capability >= 9.0", None),
        ("capability>=9.0", "H100 only", None),  # a newer one would not do
        ("memory>=80GB", "requires 40GB of GPU memory", "memory>=80GB"),
        ("memory>=40GB", "requires 80GB of GPU memory", None),
        ("bf16; fp8", "bf16 is not supported on this device", "bf16"),
        ("bf16", "requires CUDA", "bf16"),
        ("flash_attention_2", "requires flash_attn", "flash_attention_2"),
        ("flash_attention_2", "could not import 'flash_attn': undefined symbol", "flash_attention_2"),
        ("flash_attention_2", "test requires Flash Attention 3", None),
        ("nccl", "requires NCCL", "nccl"),
        ("peft>=0.18", "peft is not installed", "peft>=0.18"),
        ("torch>=2.9", "requires torch>=2.6", "torch>=2.9"),
        ("torch>=2.4", "requires torch>=2.6", None),
        ("torch", "requires torch>=2.6", None),
        ("peft", "requires bitsandbytes", None),
        ("devices>=2; memory>=80GB; bf16", "Requires 2 GPUs with 80GB of GPU memory", "devices>=2 and memory>=80GB"),
        ("devices>=2; bf16", "Requires 2 GPUs with 80GB of GPU memory", None),
        ("", "needs 2 GPUs", None),
    ],
)
def test_a_skip_denies_what_was_promised_and_nothing_more(promises: str, claim: str, denied: str | None) -> None:
    """On a host that keeps its promises, as far as its own facts tell."""
    contract = Contract(tuple(read_promise(text) for text in promises.split(";") if text.strip()))
    requirement = claimed(claim) or needs(claim)
    assert requirement is not None
    assert contract.denied(requirement, lambda _: ()) == denied


PROMISED = st.lists(
    st.sampled_from(
        ["devices>=1", "devices>=2", "devices>=4", "memory>=40GB", "memory>=80GB", "capability>=8.0", "capability>=9.0",
         "driver>=12.4", "bf16", "fp8", "flash_attention_2", "flash_attention_3", "nccl", "peft", "peft>=0.18",
         "hub_kernels", "kernels-community/flash-attn2", "bitsandbytes | torchao"]
    ).map(lambda text: read_promise(text).requirement),
    max_size=4,
)  # fmt: skip


@given(PROMISED, PROMISED)
def test_more_promises_cover_more(some: list[Requirement], more: list[Requirement]) -> None:
    merged = Requirement()
    for requirement in some:
        merged = merged.merged(requirement)
    assert covers(some, merged)
    assert covers([*more, *some], merged)
    for part in some:
        assert covers(some, part)


def test_every_field_of_a_requirement_is_looked_at() -> None:
    """A need that nobody promised is never covered, whatever its kind."""
    for text in ("capability>=9.0", "driver>=12.4", "memory>=1GB", "fp8", "flash_attention_3", "nccl", "hub_kernels",
                 "kernels-community/flash-attn2", "bitsandbytes", "peft"):  # fmt: skip
        assert not covers([read_promise("devices>=8").requirement], read_promise(text).requirement), text
