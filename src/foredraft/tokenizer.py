"""Text to token ids and back, chat templates, and incremental detokenization."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from foredraft.errors import UserError
from foredraft.models.configuration import read_json


class Tokenizer:
    """A `tokenizers.Tokenizer` with its chat template and special tokens.

    Build one with `from_gguf` or `from_folder`.

    Attributes:
        bos_token_id: Id that starts a sequence, or None where the model has none.
        eos_token_ids: All ids that end generation, the tokenizer's own end-of-sequence token first.
        special_ids: Ids that `decode` drops when it skips special tokens.
        chat_template: Jinja source of the chat template, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, int],
        eos_token_ids: Iterable[int],
        chat_template: str | None,
    ) -> None:
        """`special_tokens` maps roles, named as chat templates name them (`bos_token`, ...), to ids."""
        self._special_tokens = {role: backend.id_to_token(i) for role, i in special_tokens.items()}
        added = backend.get_added_tokens_decoder()
        backend.add_special_tokens(
            [
                AddedToken(self._special_tokens[role], special=True, normalized=False)
                for role, i in special_tokens.items()
                if i not in added or not added[i].special
            ]
        )
        self._backend = backend
        self.bos_token_id: int | None = special_tokens.get("bos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.chat_template = chat_template

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The byte-level BPE tokenizer that a GGUF file describes.

        Args:
            metadata: GGUF key to Python value, for the keys under `tokenizer.` as the GGUF specification
                (ggml/docs/gguf.md) defines them.

        Raises:
            UserError: A needed key is missing or invalid, or the model or pre-tokenizer is not supported.
        """
        backend = _byte_level_bpe(metadata)
        special_tokens = _gguf_special_tokens(metadata)
        if metadata.get("tokenizer.ggml.add_bos_token", _pretokenization(metadata).add_bos):
            bos_id = special_tokens.get("bos_token")
            if bos_id is None:
                raise UserError("GGUF metadata asks for a BOS token but has no tokenizer.ggml.bos_token_id")
            bos = backend.id_to_token(bos_id)
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
            )
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=[i for role, i in special_tokens.items() if role != "bos_token"],
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a model folder in the Hugging Face layout.

        Reads `tokenizer.json`, and where present `tokenizer_config.json`, `chat_template.jinja` (which
        wins over a template in the configuration), `generation_config.json` and `config.json`.

        Raises:
            UserError: `tokenizer.json` is missing, or one of the files is invalid.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"{path} has no tokenizer.json; save the model's fast tokenizer there "
                "(transformers: tokenizer.save_pretrained)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise UserError(f"{file} is not a valid tokenizer file: {error}") from error
        # Settings left over from training would cut long prompts or pad short ones.
        backend.no_truncation()
        backend.no_padding()

        config_file = path / "tokenizer_config.json"
        config = _read_json(config_file)
        special_tokens: dict[str, int] = {}
        for role in _FOLDER_ROLES:
            token = config.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if text is None:
                continue
            token_id = backend.token_to_id(text) if isinstance(text, str) else None
            if token_id is None:
                raise UserError(f"{config_file}: {role} is {text!r}, which is not a token of {file}")
            special_tokens[role] = token_id
        eos = [special_tokens["eos_token"]] if "eos_token" in special_tokens else []
        for name in ("generation_config.json", "config.json"):
            eos += _eos_ids(path / name)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=eos,
            chat_template=_folder_chat_template(path, config.get("chat_template")),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, in which the text of a special token stands for that token.

        Bytes that the vocabulary lacks are dropped or become its unknown token, as the model was trained.

        Args:
            add_special_tokens: Add what the model expects around a text, such as a leading BOS token.

        Raises:
            UserError: `text` is not valid Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise UserError(
                "the text holds a lone surrogate (half of a UTF-16 pair, such as \\ud800), "
                "which has no UTF-8 form; remove it"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_folder_files(self) -> dict[str, Any]:
        """JSON contents of the files that describe this tokenizer in the Hugging Face layout, by file name.

        `from_folder` and transformers' AutoTokenizer read the same tokenizer from them.
        """
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{role: token for role, token in self._special_tokens.items() if role in _FOLDER_ROLES},
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        ends = {"bos_token_id": self.bos_token_id, "eos_token_id": list(self.eos_token_ids)}
        return {
            "tokenizer.json": json.loads(self._backend.to_str()),
            "tokenizer_config.json": settings,
            "generation_config.json": {name: value for name, value in ends.items() if value not in (None, [])},
        }

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, special tokens included, for display and logprobs."""
        before = self.decode(self._anchor, skip_special_tokens=False)
        return self.decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token writes in the middle of a text, special tokens included; nothing for ids outside the
        vocabulary, and None for a part of a character whose bytes the tokenizer does not tell."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return _spelt_bytes(token)
        if _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        text = self.token_text(token_id)
        return None if "\ufffd" in text else text.encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _anchor(self) -> list[int]:
        # Decoders of the SentencePiece kind strip the space of the first token only.
        return self.encode("a", add_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: Each with `role` and `content`, and whatever else the template reads.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: JSON schemas of the functions that the model may call.
            variables: Further template variables, such as `enable_thinking`.

        Raises:
            UserError: The model has no chat template, or the template is invalid or refuses the messages.
        """
        context = {"documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                context, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except _TEMPLATE_FAILURES as error:
            raise UserError(f"the model's chat template failed on these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Prompt token ids of a conversation; arguments and errors are those of `apply_chat_template`."""
        # The template has written the special tokens, BOS included, itself.
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise UserError("this model has no chat template; give it a plain prompt instead of messages")
        try:
            return _template_environment().from_string(self.chat_template)
        except TemplateError as error:
            raise UserError(f"the model's chat template is not valid Jinja: {error}") from error


class Detokenizer:
    """Text of one sequence, token by token, at a cost per token that does not grow with its length.

    The pieces that `push` and `finish` return concatenate to `tokenizer.decode(ids)`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        backend = tokenizer._backend
        self._id_to_token = backend.id_to_token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = (
            _ByteLevelStream() if isinstance(backend.decoder, decoders.ByteLevel) else _WindowStream(tokenizer)
        )
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_id: int) -> str:
        """New text that `token_id` completes: whole characters only, so it may be empty."""
        token = self._id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        return self._keep(self._stream.push(token_id, token))

    def finish(self) -> str:
        """What was held back: the sequence has ended. An incomplete character becomes U+FFFD."""
        return self._keep(self._stream.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class _ByteLevelStream:
    """Tokens that spell bytes: decoding is decoding UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        return self._decoder.decode(_spelt_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other decoder whose text for a token depends on at most the token before it.

    Byte-fallback tokens (`<0xE2>`) are held until their run ends, because one invalid byte turns every
    byte of its run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._held.append(token_id)
        return "" if _BYTE_FALLBACK.fullmatch(token) else self.finish()

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        text = self._tokenizer.decode(self._before + self._held, skip_special_tokens=False)
        self._before = self._held[-1:]
        self._held = []
        return text[len(before) :]


_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _spelt_bytes(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # an added token, spelled as plain text
        return token.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character to byte as in GPT-2: visible Latin-1 stands for itself, the other bytes start at U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


# GGUF


@dataclass(frozen=True, slots=True)
class _Pretokenization:
    """How a text is cut before the merges: each pattern isolates its matches within the pieces so far."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By `tokenizer.ggml.pre`: named in llama.cpp (src/llama-vocab.cpp), defined by the models' tokenizer.json.
# Qwen's NFC is in its tokenizer.json only; `default` is llama.cpp's own.
_PRETOKENIZATIONS = {
    "smollm": _Pretokenization((r"\p{N}", _GPT2)),
    "gpt-2": _Pretokenization((_GPT2,)),
    "llama-bpe": _Pretokenization((_CL100K,), ignore_merges=True, add_bos=True),
    "qwen2": _Pretokenization((_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),), nfc=True),
    "default": _Pretokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# The padding and unknown ids are left out: old conversions give them ordinary tokens, such as id 0, which
# would then vanish from decoded text.
_GGUF_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
}

# Values of `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def _pretokenization(metadata: Mapping[str, Any]) -> _Pretokenization:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRETOKENIZATIONS:
        raise UserError(
            f"GGUF field tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(_PRETOKENIZATIONS))} "
            "(for other models, use the Hugging Face folder)"
        )
    return _PRETOKENIZATIONS[pre]


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UserError(
            f"GGUF field tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported "
            "(for other models, use the Hugging Face folder)"
        )
    pretokenization = _pretokenization(metadata)
    tokens = _gguf_list(metadata, "tokens")
    merges = [merge.partition(" ")[::2] for merge in _gguf_list(metadata, "merges")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    try:
        bpe = models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pretokenization.ignore_merges,
        )
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"GGUF fields tokenizer.ggml.tokens and .merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if pretokenization.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenization.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _gguf_list(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise UserError(f"GGUF metadata has no list tokenizer.ggml.{name}: the file holds no complete tokenizer")
    return value


def _gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, int]:
    count = len(_gguf_list(metadata, "tokens"))
    special_tokens: dict[str, int] = {}
    for role, name in _GGUF_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}")
        if token_id is None:
            continue
        if not 0 <= token_id < count:
            raise UserError(f"GGUF field tokenizer.ggml.{name} is {token_id}, outside the {count} tokens")
        special_tokens[role] = token_id
    return special_tokens


# Hugging Face folder


_FOLDER_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _eos_ids(file: Path) -> list[int]:
    config = _read_json(file)
    # Multimodal configurations keep the language model's own fields one level down.
    text_config = config.get("text_config")
    value = config.get("eos_token_id")
    if value is None and isinstance(text_config, dict):
        value = text_config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise UserError(f"{file}: eos_token_id is {value!r}, expected an integer or a list of integers")
    return ids


def _folder_chat_template(path: Path, configured: Any) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if configured is None or isinstance(configured, str):
        return configured
    try:
        templates = {entry["name"]: entry["template"] for entry in configured}
        return str(templates["default"])
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a string or a list of "
            '{"name", "template"} objects with one named "default"'
        ) from error


# Chat templates


# What a template raises by itself, by the sandbox's refusal, or on messages of a shape it does not expect.
_TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; a prompt only needs its content."""

    tags = {"generation"}  # noqa: RUF012  (a class variable in jinja2 too)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it (transformers documentation, "Chat templates").

    Sandboxed, because a template is code that comes with a downloaded model.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
