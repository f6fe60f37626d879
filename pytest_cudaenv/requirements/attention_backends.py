"""The attention backends that transformers knows by name, as data, and a project's own beside them.

Capabilities, dtypes and head sizes are those of the libraries: transformers asks for none of them once a package is
installed (measured, 5.24). Sources: https://github.com/Dao-AILab/flash-attention (csrc/flash_attn/flash_api.cpp,
hopper/flash_api.cpp, flash_attn/cute/interface.py), https://github.com/huggingface/transformers
(modeling_flash_attention_utils.py, utils/import_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pytest_cudaenv.requirements.capability import Capabilities, at_least, exactly
from pytest_cudaenv.requirements.hub_kernels import attention_kernel
from pytest_cudaenv.requirements.names import plain, spelled, unknown_name

FLASH_DTYPES = ("float16", "bfloat16")
ANY_DTYPES = ("float64", "float32", "float16", "bfloat16")

FLASH_FLAG = "_supports_flash_attn"


@dataclass(frozen=True)
class AttnBackend:
    """One attention backend: how it is called, what it needs and what it takes.

    The defaults describe an attention function of a project's own, registered with transformers under `name`, that
    is plain torch.
    """

    name: str
    """As `attn_implementation` takes it."""
    title: str = ""
    """As messages call it, `FA3`; the name where it is empty."""
    aliases: tuple[str, ...] = ()
    """Other spellings; case, dashes and underscores do not matter in any of them."""
    distribution: str = "torch"
    modules: tuple[str, ...] = ()
    """Modules of which one must be there; transformers looks for the first one."""
    proof: str = ""
    """`module:name` of the public function whose import proves that the package works."""
    minimum: str | None = None
    """The oldest version of the distribution that transformers takes."""
    source: str = ""
    """What pip is to install where it is not the distribution by its name."""
    must_have_metadata: bool = False
    """The module alone proves nothing, because another distribution ships it too."""
    kernel: str | None = None
    """The Hub kernel that transformers loads where the package is missing."""
    capabilities: Capabilities | None = None
    """The devices for which the package has code; None: all."""
    dtypes: tuple[str, ...] = ANY_DTYPES
    dtypes_on: Mapping[str, Capabilities] = field(default_factory=dict)
    """Further dtypes, each on some of those devices only."""
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    runs_on_cpu: bool = True
    model_flag: str | None = None
    """The class attribute with which a model says that it has this backend."""
    remedy: str = "Run it on a device of that capability."
    """What to do where the device is not one of them."""
    entry_points: tuple[str, ...] = ()
    """The functions `module:name` that call it: by these, and its operators, the witness knows that it ran."""
    operators: tuple[str, ...] = ()
    """Globs of its custom operators' names, `ring::*`."""

    @property
    def label(self) -> str:
        """The title, or the name where there is none."""
        return self.title or self.name


BACKENDS: dict[str, AttnBackend] = {
    b.name: b
    for b in (
        AttnBackend("eager"),
        AttnBackend("sdpa", model_flag="_supports_sdpa"),
        AttnBackend(
            "flash_attention_2",
            title="FA2",
            aliases=("fa2", "flash_attn_2"),
            distribution="flash-attn",
            modules=("flash_attn",),
            proof="flash_attn:flash_attn_func",
            minimum="2.3.3",
            kernel="kernels-community/flash-attn2",
            # Older wheels have no image for Blackwell. No metadata says which have, and unknown is no reason to skip:
            # https://github.com/Dao-AILab/flash-attention/issues/1638
            capabilities=at_least(8, 0),
            dtypes=FLASH_DTYPES,
            max_head_dim=256,  # other sizes than multiples of 8 are padded by its Python functions
            runs_on_cpu=False,
            model_flag=FLASH_FLAG,
            remedy="FlashAttention-2 has code for Ampere and newer; use sdpa on this device.",
        ),
        AttnBackend(
            "flash_attention_3",
            title="FA3",
            aliases=("fa3", "flash_attn_3"),
            distribution="flash-attn-3",
            # Newer sources add a package flash_attn_3 with the compiled part.
            modules=("flash_attn_interface", "flash_attn_3"),
            proof="flash_attn_interface:flash_attn_func",
            # The project of that name on PyPI has been an empty placeholder.
            source="git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper",
            kernel="kernels-community/vllm-flash-attn3",
            # The code takes 8.x too, but a build need not hold an image for it, and none holds one for Blackwell:
            # https://github.com/facebookresearch/xformers/issues/1338
            capabilities=exactly("sm_90", (9, 0)),
            dtypes=FLASH_DTYPES,
            dtypes_on={"float8_e4m3fn": exactly("sm_90", (9, 0))},
            max_head_dim=256,
            head_dim_multiple=8,
            runs_on_cpu=False,
            model_flag=FLASH_FLAG,
            remedy="The package has code for Hopper; on 8.x the Hub kernel kernels-community/vllm-flash-attn3 runs.",
        ),
        AttnBackend(
            "flash_attention_4",
            title="FA4",
            aliases=("fa4", "flash_attn_4"),
            distribution="flash-attn-4",
            modules=("flash_attn.cute",),
            proof="flash_attn.cute:flash_attn_func",
            must_have_metadata=True,  # wheels of FlashAttention-2 ship flash_attn/cute as well
            kernel="kernels-community/flash-attn4",
            # Officially Hopper and the three Blackwells. The newest forward takes 8.x, the backward does not, and
            # transformers names 9 as its lowest major.
            capabilities=exactly("9.0, 10.x, 11.0 or 12.x", (9, 0), 10, (11, 0), 12),
            dtypes=FLASH_DTYPES,
            dtypes_on={"float8_e4m3fn": exactly("10.x", 10)},
            max_head_dim=256,
            head_dim_multiple=8,
            runs_on_cpu=False,
            model_flag=FLASH_FLAG,
            remedy="FlashAttention-4 has code for Hopper and Blackwell; use flash_attention_2 or sdpa on this device.",
        ),
        AttnBackend(
            "flex_attention",
            title="flex",
            aliases=("flex", "flex_attn"),
            minimum="2.5",
            # Compiled by Triton, which has no code for anything older, and without a backward on the CPU.
            capabilities=at_least(7, 0),
            runs_on_cpu=False,
            model_flag="_supports_flex_attn",
            remedy="FlexAttention is compiled by Triton, for Volta and newer; use sdpa on this device.",
        ),
    )
}

_registered: Mapping[str, AttnBackend] = MappingProxyType({})
# The one piece of module state: a project's own backends, filled once per pytest session by the plugin's hook,
# before any name is read. Passing a registry through every requirement and marker would buy nothing.


class UnknownBackendError(ValueError):
    """A name that is neither a backend nor a Hub kernel; the text names the choices."""


def with_backends(extra: Mapping[str, AttnBackend]) -> None:
    """Make these the project's own backends, in place of the ones before; they win over ours of the same name."""
    global _registered  # noqa: PLW0603
    _registered = MappingProxyType(dict(extra))


def registered() -> Mapping[str, AttnBackend]:
    """Every backend by canonical name, the project's own included."""
    return {**BACKENDS, **_registered}


def backend_name(text: str) -> str:
    """The canonical name of a backend in any spelling (`fa3`, `Flash-Attn3`); a Hub kernel `org/name@rev:fn` as it is.

    Raises UnknownBackendError, with the choices, for anything else.
    """
    known = registered()
    name = text.strip() if isinstance(text, str) else ""
    if name in known or attention_kernel(name):
        return name
    spellings = spelled((s, b.name) for b in known.values() for s in (b.name, *b.aliases))
    if plain(name) in spellings:
        return spellings[plain(name)]
    choices = f"{', '.join(known)}, or a Hub kernel org/name[@revision][:function]"
    raise UnknownBackendError(unknown_name("attention backend", text, spellings, choices))
