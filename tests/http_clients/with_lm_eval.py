"""lm-evaluation-harness on the URL given and on its own `hf` backend: the same figures.

Further arguments: the target's directory, and a file of word problems, as JSON lines of GSM8K.
"""

import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, TARGET, PROBLEMS = sys.argv[1:]
TASKS = Path(__file__).parents[2] / "bench/harness_tasks"
MOST_NATS = 1e-3


def evaluate(backend, **arguments):
    found = simple_evaluate(
        backend,
        model_args=arguments,
        tasks=["word_problems_choose", "word_problems_guess", "word_problems_solve"],
        task_manager=TaskManager(include_path=str(TASKS), metadata={"path": PROBLEMS}),
        apply_chat_template=True,
        batch_size=8,
        bootstrap_iters=0,
    )
    for name, samples in found["samples"].items():
        samples.sort(key=lambda sample: sample["doc_id"])
        print(name, {k: v for k, v in found["results"][name].items() if "," in k})
    return found


theirs = evaluate("hf", pretrained=TARGET, dtype="float32", device="cpu")
ours = evaluate(
    "local-completions",
    model="target:exact",
    base_url=f"{URL}/v1/completions",
    tokenizer=TARGET,
    tokenizer_backend="huggingface",
    max_length=4096,
)
assert ours["results"] == theirs["results"]
distances = []
for name, expected in theirs["samples"].items():
    for one, other in zip(expected, ours["samples"][name], strict=True):
        if name == "word_problems_solve":
            assert one["resps"] == other["resps"]
            continue
        for [(logprob, is_greedy)], [(found, found_greedy)] in zip(
            one["resps"], other["resps"], strict=True
        ):
            distances.append(abs(logprob - found))
            assert is_greedy == found_greedy
assert max(distances) < MOST_NATS
print(f"lm_eval: passed; {len(distances)} log-likelihoods within {max(distances):.1e}")
