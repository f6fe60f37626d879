"""What the `require_*` decorators of transformers and accelerate ask for, in this plugin's words; tables, no imports.

Each library decides at import and leaves no trace on a test that it does not skip. `adoption` wraps the decorators;
here it says what each one means: what a test that it lets through is granted, and what explains its skips.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.ledger.vendors import vendor_reason
from pytest_cudaenv.requirements.markers import requires_cuda, requires_dtype
from pytest_cudaenv.requirements.reason import Rank, Reason, brief
from pytest_cudaenv.requirements.requirement import Requirement

GIB = 1024**3


@dataclass(frozen=True)
class Known:
    """One use of a decorator, in this plugin's words."""

    grant: Requirement = field(default_factory=Requirement)
    """What a test that it lets through asks for on a CUDA host: never more than the library itself checked, but for
    attention backends, whose code for a device no library checks."""
    needs: Requirement = field(default_factory=Requirement)
    """What a test that it skips lacks."""
    reason: Reason | None = None
    """Why it skips, where that is no requirement: other hardware, memory of the host, a command."""
    at_most: int | None = None
    """It skips where more devices are visible; a grant is never more than what a test asks for."""
    total_memory: int = 0
    """Bytes on all devices of the test together."""
    decided_here: bool = False
    """Its own check would initialise CUDA, and holds on every CUDA device."""


Rule = Callable[..., Known]
"""The decorator's own arguments, by name -> what this use of it means."""

ONE = Requirement(devices=1)
ANY = Requirement(device_if_any=True)


def granted(known: Known, devices: Sequence[CudaDevice]) -> Requirement:
    """What a test that the decorator lets through is granted on a host where CUDA shows these devices."""
    if not known.total_memory:
        return known.grant
    total, count = 0, 0
    for device in devices:
        if total >= known.total_memory:
            break
        total, count = total + (device.total_memory or 0), count + 1
    return replace(known.grant, devices=max(1, count))


# What the rules are made of ------------------------------------------------------------------------------------


def _always(known: Known) -> Rule:
    return lambda **_: known


def _same(requirement: Requirement) -> Rule:
    return _always(Known(requirement, requirement))


def _packages(*specs: str, gpu: bool = False) -> Rule:
    """Packages alone: the library has looked, so nothing is asked of a test that it lets through; `gpu`: whose code
    runs on a device where there is one, so that such a test takes its turn there."""
    return _always(Known(ANY if gpu else Requirement(), Requirement(packages=specs)))


def _vendor(vendor: str, count: int = 1) -> Rule:
    return _always(Known(reason=vendor_reason(vendor, count)))


def _at_most(count: int) -> Rule:
    return _always(Known(ANY, at_most=count))


def _count(n: int = 1) -> Known:
    requirement = Requirement(devices=max(1, int(n)))
    return Known(requirement, requirement)


def _large(memory: float = 20) -> Known:
    # The number says how large a device is, not what the test uses of it: it takes the device whole.
    requirement = Requirement(devices=1, memory=int(memory * GIB), exclusive=True)
    return Known(requirement, requirement)


def _total(memory: float = 0) -> Known:
    amount = int(memory * GIB)
    return Known(Requirement(devices=1, exclusive=True), Requirement(devices=1, memory=amount), total_memory=amount)


def _capability(major: int = 0, minor: int = 0) -> Known:
    wanted = requires_cuda(capability=f">={major}.{minor}")
    # Without CUDA it lets every test through.
    return Known(replace(wanted, devices=0, device_if_any=True), wanted)


def _attention(*backends: str, needs_device: bool = True) -> Rule:
    requirement = Requirement(devices=1, attn_backends=backends)
    return _always(Known(requirement if needs_device else replace(ANY, attn_backends=backends), requirement))


def _dtype(name: str, *, enforced: bool = False, decided_here: bool = False) -> Rule:
    """`enforced` where the library asks for native support too."""
    return _always(Known(requires_dtype(name) if enforced else ANY, requires_dtype(name), decided_here=decided_here))


def _version(distribution: str, argument: str = "version") -> Rule:
    def rule(**arguments: Any) -> Known:
        version = arguments.get(argument)
        spec = f"{distribution}>={version}" if version else distribution
        return Known(needs=Requirement(packages=(spec,)))

    return rule


def _host_memory(memory: float = 80) -> Known:
    have = f"{_host_ram() / GIB:.1f} GiB" if _host_ram() else "an amount that nobody knows"
    need = f"needs more than {memory:g} GiB of host memory"
    return Known(reason=brief("host-memory", need, have, "Run it on a runner with that much memory."))


def _host_ram() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _command(name: str) -> Rule:
    return _always(Known(reason=brief("host-command", f"needs the command {name}", "none", f"Install {name}.")))


def _plain(package: str) -> Rule:
    return _packages(package)


NOTHING = _always(Known())
"""It asks for no device: it sets a mode, or skips on other hardware only."""

MANY = Requirement(devices=2)

# transformers.testing_utils ------------------------------------------------------------------------------------

TRANSFORMERS: dict[str, Rule] = {
    "require_torch_gpu": _same(ONE),
    "require_torch_accelerator": _same(ONE),
    "require_torch_multi_gpu": _same(MANY),
    "require_torch_multi_accelerator": _same(MANY),
    "require_torch_n_accelerators": _count,
    "require_torch_non_multi_gpu": _at_most(1),
    "require_torch_non_multi_accelerator": _at_most(1),
    "require_torch_up_to_2_gpus": _at_most(2),
    "require_torch_up_to_2_accelerators": _at_most(2),
    "require_torch_large_gpu": _large,
    "require_torch_large_accelerator": _large,
    "require_torch_accelerator_memory": _total,
    "require_cuda_capability_at_least": _capability,
    "require_torch_fp16": _dtype("float16", decided_here=True),  # it multiplies matrices on the device
    "require_torch_bf16": _dtype("bfloat16"),  # emulation is good enough for it
    "require_torch_tf32": _dtype("tf32", enforced=True),
    "require_fp8": _packages("accelerate", "torchao | transformer-engine", gpu=True),
    "require_flash_attn": _attention("flash_attention_2"),
    "require_flash_attn_3": _attention("flash_attention_3"),
    "require_flash_attn_4": _attention("flash_attention_4"),
    "require_all_flash_attn": _attention("flash_attention_2", "flash_attention_3", "flash_attention_4"),
    "require_flex_attention": _attention("flex_attention", needs_device=False),
    "require_kernels": _packages("kernels", gpu=True),
    "require_large_cpu_ram": _host_memory,
    "require_usr_bin_time": _command("/usr/bin/time"),
    "require_deterministic_for_xpu": NOTHING,
    "require_deterministic_for_accelerator": NOTHING,
    # Other hardware: a test that one of these lets through does not run on CUDA.
    "require_torch_xla": _vendor("xla"),
    "require_torch_neuroncore": _vendor("neuron"),
    "require_torch_tpu": _vendor("tpu"),
    "require_torch_npu": _vendor("npu"),
    "require_torch_multi_npu": _vendor("npu", 2),
    "require_torch_xpu": _vendor("xpu"),
    "require_torch_multi_xpu": _vendor("xpu", 2),
    "require_torch_multi_hpu": _vendor("hpu", 2),
    "require_torch_mps": _vendor("mps"),
    "require_rocm": _vendor("rocm"),
    "require_non_hpu": _vendor("non-hpu"),
    "require_non_xpu": _vendor("non-xpu"),
    # Versions that are an argument.
    "require_torch_greater_or_equal": _version("torch"),
    "require_huggingface_hub_greater_or_equal": _version("huggingface-hub"),
    "require_peft_greater_or_equal": _version("peft"),
    "require_torchao_version_greater_or_equal": _version("torchao", "torchao_version"),
    "require_accelerate": _version("accelerate", "min_version"),
    "require_gguf": _version("gguf", "min_version"),
    "require_fsdp": _version("torch", "min_version"),
    "require_mistral_common": _version("mistral-common", "min_version"),
    "require_triton": _version("triton", "min_version"),
    # Packages whose code runs on a device where there is one.
    "require_apex": _packages("apex", gpu=True),
    "require_aqlm": _packages("aqlm", gpu=True),
    "require_auto_round": _packages("auto-round>=0.5", gpu=True),
    "require_bitsandbytes": _packages("bitsandbytes>=0.46.1", gpu=True),
    "require_causal_conv1d": _always(Known(ONE, Requirement(devices=1, packages=("causal-conv1d",)))),
    "require_compressed_tensors": _packages("compressed-tensors>=0.15", gpu=True),
    "require_deepspeed": _packages("deepspeed", gpu=True),
    "require_fbgemm_gpu": _packages("fbgemm-gpu | fbgemm-gpu-genai", gpu=True),
    "require_flash_linear_attention": _packages("flash-linear-attention", gpu=True),
    "require_flute_hadamard": _packages("flute-kernel>=0.4.1", "fast-hadamard-transform", gpu=True),
    "require_fouroversix": _packages("fouroversix", gpu=True),
    "require_fp_quant": _packages("fp-quant>=0.3.2", gpu=True),
    "require_gptqmodel": _packages("gptqmodel", gpu=True),
    "require_hqq": _packages("hqq>=0.2.1", gpu=True),
    "require_liger_kernel": _packages("liger-kernel", gpu=True),
    "require_natten": _packages("natten", gpu=True),
    "require_optimum_quanto": _packages("optimum-quanto", gpu=True),
    "require_quark": _packages("amd-quark>=0.12", gpu=True),
    "require_qutlass": _packages("qutlass>=0.2", gpu=True),
    "require_spqr": _packages("spqr-quant", gpu=True),
    "require_torch_tensorrt_fx": _packages("torch-tensorrt", gpu=True),
    "require_torchao": _packages("torchao>=0.15", gpu=True),
    "require_vptq": _packages("vptq", gpu=True),
    # Packages alone.
    "require_apollo_torch": _plain("apollo-torch"),
    "require_av": _plain("av"),
    "require_bs4": _plain("beautifulsoup4"),
    "require_clearml": _plain("clearml"),
    "require_cv2": _plain("opencv-python | opencv-python-headless"),
    "require_cython": _plain("Cython"),
    "require_decord": _plain("decord"),
    "require_detectron2": _plain("detectron2"),
    "require_diffusers": _plain("diffusers"),
    "require_essentia": _plain("essentia"),
    "require_executorch": _plain("executorch"),
    "require_faiss": _plain("faiss-cpu | faiss-gpu"),
    "require_g2p_en": _plain("g2p-en"),
    "require_galore_torch": _plain("galore-torch"),
    "require_grokadamw": _plain("grokadamw"),
    "require_ipython": _plain("ipython"),
    "require_jinja": _plain("jinja2"),
    "require_jumanpp": _packages("rhoknp"),
    "require_levenshtein": _plain("Levenshtein | python-Levenshtein"),
    "require_librosa": _plain("librosa"),
    "require_lomo": _plain("lomo-optim"),
    "require_multipart": _plain("python-multipart"),
    "require_nltk": _plain("nltk"),
    "require_nncf": _plain("nncf"),
    "require_numba": _plain("numba"),
    "require_onnx": _plain("onnx"),
    "require_onnxruntime": _plain("onnxruntime | onnxruntime-gpu"),
    "require_onnxscript": _plain("onnxscript"),
    "require_openai": _plain("openai"),
    "require_openvino": _plain("openvino"),
    "require_optimum": _plain("optimum"),
    "require_optuna": _plain("optuna"),
    "require_pandas": _plain("pandas"),
    "require_peft": _plain("peft"),
    "require_phonemizer": _plain("phonemizer"),
    "require_pretty_midi": _plain("pretty-midi"),
    "require_pyctcdecode": _plain("pyctcdecode"),
    "require_pytesseract": _plain("pytesseract"),
    "require_pytorch_quantization": _plain("pytorch-quantization"),
    "require_ray": _plain("ray"),
    "require_rjieba": _plain("rjieba"),
    "require_sacremoses": _plain("sacremoses"),
    "require_schedulefree": _plain("schedulefree"),
    "require_scipy": _plain("scipy"),
    "require_sentencepiece": _plain("sentencepiece"),
    "require_seqio": _plain("seqio"),
    "require_serve": _packages("pydantic", "fastapi", "uvicorn", "openai"),
    "require_soundfile": _plain("soundfile"),
    "require_spacy": _plain("spacy"),
    "require_speech": _plain("torchaudio"),
    "require_sudachi": _plain("sudachipy"),
    "require_sudachi_projection": _plain("sudachipy>=0.6.8"),
    "require_swanlab": _plain("swanlab"),
    "require_tensorboard": _plain("tensorboard | tensorboardX"),
    "require_tiktoken": _plain("tiktoken"),
    "require_timm": _plain("timm"),
    "require_tokenizers": _plain("tokenizers"),
    "require_torch": _plain("torch"),
    "require_torch_optimi": _plain("torch-optimi"),
    "require_torchaudio": _plain("torchaudio"),
    "require_torchcodec": _plain("torchcodec"),
    "require_torchvision": _plain("torchvision"),
    "require_torchvision_video_decoding": _plain("torchvision<0.26"),
    "require_trackio": _plain("trackio"),
    "require_vision": _plain("pillow"),
    "require_wandb": _plain("wandb"),
}
"""Every `require_*` of transformers 5.22."""

# accelerate.test_utils.testing ---------------------------------------------------------------------------------

ACCELERATE: dict[str, Rule] = {
    "require_cuda": _same(ONE),
    "require_non_cpu": _same(ONE),
    "require_cuda_or_hpu": _same(ONE),
    "require_cuda_or_xpu": _same(ONE),
    "require_multi_gpu": _same(MANY),
    "require_multi_device": _same(MANY),
    "require_multi_gpu_or_xpu": _same(MANY),
    "require_single_gpu": _always(Known(ONE, ONE, at_most=1)),
    "require_single_device": _always(Known(ONE, ONE, at_most=1)),
    "require_cpu": _always(
        Known(reason=brief("cuda-present", "needs a host without a GPU", "one", "Run it on a runner without a GPU."))
    ),
    "require_fp16": NOTHING,  # true of everything but Habana's Gaudi 1
    "require_fp8": _packages("torchao | transformer-engine | msamp", gpu=True),
    "require_bnb": _packages("bitsandbytes", gpu=True),
    "require_deepspeed": _packages("deepspeed", gpu=True),
    "require_torchao": _packages("torchao", gpu=True),
    "require_transformer_engine": _packages("transformer-engine", gpu=True),
    "require_transformer_engine_mxfp8": _packages("transformer-engine>=2.0", gpu=True),
    "require_triton": _packages("triton", gpu=True),
    "require_xpu": _vendor("xpu"),
    "require_single_xpu": _vendor("xpu"),
    "require_multi_xpu": _vendor("xpu", 2),
    "require_non_xpu": _vendor("non-xpu"),
    "require_non_hpu": _vendor("non-hpu"),
    "require_mlu": _vendor("mlu"),
    "require_sdaa": _vendor("sdaa"),
    "require_musa": _vendor("musa"),
    "require_npu": _vendor("npu"),
    "require_neuron": _vendor("neuron"),
    "require_mps": _vendor("mps"),
    "require_tpu": _vendor("tpu"),
    "require_non_torch_xla": _vendor("non-xla"),
    "require_torch_min_version": _version("torch"),
    "require_fsdp2": _plain("torch>=2.5"),
    "require_tp": _packages("torch>=2.3", "transformers>=4.52"),
    "require_pippy": _plain("torch>=2.4"),
    "require_huggingface_suite": _packages("transformers", "datasets"),
    "require_trackers": _plain("wandb | tensorboard | tensorboardX | trackio | swanlab"),
    "require_import_timer": _plain("import-timer"),
    "require_aim": _plain("aim"),
    "require_clearml": _plain("clearml"),
    "require_comet_ml": _plain("comet-ml"),
    "require_datasets": _plain("datasets"),
    "require_dvclive": _plain("dvclive"),
    "require_matplotlib": _plain("matplotlib"),
    "require_mlflow": _plain("mlflow | mlflow-skinny"),
    "require_pandas": _plain("pandas"),
    "require_peft": _plain("peft"),
    "require_schedulefree": _plain("schedulefree"),
    "require_swanlab": _plain("swanlab"),
    "require_tensorboard": _plain("tensorboard | tensorboardX"),
    "require_timm": _plain("timm"),
    "require_torchdata_stateful_dataloader": _plain("torchdata>=0.8"),
    "require_torchvision": _plain("torchvision"),
    "require_trackio": _plain("trackio"),
    "require_transformers": _plain("transformers"),
    "require_wandb": _plain("wandb"),
}
"""Every `require_*` of accelerate 1.15."""

LIBRARIES: dict[str, tuple[tuple[str, ...], Mapping[str, Rule]]] = {
    "transformers": (("transformers.testing_utils",), TRANSFORMERS),
    "accelerate": (("accelerate.test_utils.testing", "accelerate.test_utils"), ACCELERATE),
}
"""Value of `cuda_adopt` -> the modules whose decorators are wrapped, and what they mean."""


def skip_reasons(known: Known, unmet: Sequence[Reason], visible: int, name: str) -> tuple[Reason, ...]:
    """Why a decorator skips, once `unmet` says which of `known.needs` this host does not meet."""
    if known.reason is not None:
        return (known.reason,)
    if known.at_most is not None and visible > known.at_most:
        need = f"needs at most {known.at_most} CUDA device{'s' if known.at_most > 1 else ''}"
        return (brief("cuda-too-many", need, str(visible), "Grant it one: do not switch --cuda-isolation off."),)
    return tuple(unmet) or (disagrees(name),)


def disagrees(who: str) -> Reason:
    """A skip whose need this host meets: the check is broken, stale, or asks for more than it says."""
    remedy = (
        "Its own check says no where this host's facts say yes: a broken package, a remembered answer, or a condition "
        "that asks for more than it tells. `pytest-cudaenv doctor` prints the facts."
    )
    return brief("skip-disagrees", f"{who} skips", "a host that meets it", remedy, Rank.BROKEN)
