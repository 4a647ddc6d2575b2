"""The command line as a user meets it: exit status, messages, output. Models are tiny folders made here."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest

from foredraft import __version__


def test_version_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", "--version"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"foredraft {__version__}\n")


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["bench"], ["train"], ["synthesize"], ["demo"]])
def test_help_teaches_by_example(foredraft, command):
    status, out, _ = foredraft(*command, "--help")
    assert status == 0
    assert "Usage: foredraft" in out
    if command != ["demo"]:
        assert "foredraft " + (command[0] if command else "generate") + " smollm2-135m" in " ".join(out.split())


TRAIN = ["train", "smollm2-135m", "--data", "x", "--output", "x"]
DFLASH = str(files("foredraft") / "assets" / "dflash-smollm2-135m")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "no-such-model", "-p", "x"], "no model 'no-such-model'"),
        (["generate", "smollm2-135m", "-p", "x", "--method", "magic"], "method 'magic' is not known"),
        (["generate", "smollm2-135m", "-p", "x", "--method", "dflash", "-N", "99"], "num_speculative_tokens is 99"),
        (["generate", "smollm2-135m", "-p", "x", "--method", "dflash", "-N", "0"], "num_speculative_tokens is 0"),
        (["generate", "smollm2-135m", "-p", "x", "-N", "3"], "the method is none"),
        (["generate", "smollm2-135m", "-p", "x", "--device", "toaster"], "device is 'toaster'"),
        (["train", "smollm2-135m", "--data", "x", "--output", __file__], "is not a writable folder"),
        (["export", "smollm2-135m", "--method", "dflash", "--output", __file__], "is not a writable folder"),
        (["export", "smollm2-135m", "--method", "magic", "--format", "compact", "--output", "x"], "is not known"),
        (["generate", "smollm2-135m", "-p", "x", "--speculative-config", "{"], "not valid JSON"),
        (["generate", "smollm2-135m", "-p", "x", "--speculative-config", '{"method": "dflash", "k": 1}'], "unknown"),
        (["generate", "smollm2-135m", "-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "smollm2-135m", "-p", ""], "prompt is empty"),
        (["generate", "smollm2-135m", "-p", "x", "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "smollm2-135m", "-p", "x", "--quantization", "fp2"], "fp2"),
        (["generate", "smollm2-135m", "-p", "word " * 9000], "the prompt has"),
        (["generate", "smollm2-135m"], "Missing option"),
        (["train", "smollm2-135m", "--data", "none.jsonl", "--output", "x"], "none.jsonl does not exist"),
        ([*TRAIN, "--method", "mtp", "--taps", "1"], "mtp has no choice of --taps"),
        ([*TRAIN, "--method", "mtp", "--layers", "2", "--markov-rank", "9"], "no choice of --layers, --markov-rank"),
        ([*TRAIN, "--method", "eagle3", "--layers", "2"], "eagle3 has no choice of --layers"),
        ([*TRAIN, "--init", DFLASH, "--draft-vocab-size", "9"], "leave out --draft-vocab-size"),
        ([*TRAIN, "--method", "dspark", "--init", DFLASH, "--markov-rank", "9", "--taps", "1"], "leave out --taps"),
        ([*TRAIN, "--init", "x"], "no drafter there"),
        ([*TRAIN, "--feature-taps", "1"], "give that too"),
        (["synthesize", "smollm2-135m", "--output", "x"], "either --prompts FILE or --self-written"),
        (["bench", "smollm2-135m", "--dataset", "trivia"], "trivia"),
        (["no-such-command"], "No such command"),
    ],
)
def test_wrong_input_exits_2_with_one_sentence(foredraft, arguments, says):
    status, out, err = foredraft(*arguments)
    assert status == 2, err
    assert says in " ".join(err.split())
    assert "Traceback" not in err
    assert out == ""


def test_generate_json_with_and_without_speculation(foredraft):
    common = ["generate", "smollm2-135m", "-p", "Say hello.", "--max-tokens", "24", "--json"]
    plain = json.loads(foredraft(*common)[1])
    drafted = json.loads(foredraft(*common, "--method", "dflash", "-N", "4")[1])
    assert plain["token_ids"] == drafted["token_ids"] and plain["text"] == drafted["text"]
    assert plain["finish_reason"] in ("stop", "length")
    assert plain["metrics"]["acceptance_length"] == 1.0 and plain["metrics"]["acceptance_rate_per_position"] == []
    assert len(drafted["metrics"]["acceptance_rate_per_position"]) == 4
    assert drafted["metrics"]["rounds"] < plain["metrics"]["rounds"]


def test_chat_reads_lines_and_ends_with_the_input(foredraft):
    status, out, err = foredraft("chat", "smollm2-135m", "--max-tokens", "8", stdin="Hello\nAgain\n")
    assert status == 0, err
    assert out.count("tok/s") == 2
    assert "τ" in out
