"""The bundled models' corpus: chats about word problems, equation drills, Python source.

Everything but the Python source depends only on the seed; the source is the running interpreter's
standard library (`flyspec_lab.python_source`), so its version is part of the recipe. No torch, no
network.
"""

from __future__ import annotations

import random

from flyspec_lab.word_problems import WordProblem
from flyspec_lab.word_problems.families import LIMIT

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, END)

# For `tokenizer.apply_chat_template`; includes the BOS, so the text must be encoded without special
# tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_prompt(question: str) -> str:
    """Return the prompt for a solution, as the chat template renders it."""
    return f"{BOS}{USER}{question.strip()}{END}{ASSISTANT}"


def chat_text(problem: WordProblem) -> str:
    """Return a problem's full text for training."""
    return f"{chat_prompt(problem.question)}{problem.solution}{END}"


def drills(rng: random.Random, n: int) -> str:
    """Return `n` equations, one per line, to teach arithmetic in few tokens."""
    lines: list[str] = []
    while len(lines) < n:
        kind = rng.choices("+-*/", (5, 5, 2, 1))[0]
        if kind in "+-":
            low, high = sorted((rng.randint(1, LIMIT - 1), rng.randint(2, LIMIT)))
            if low == high:
                continue
            a, b = rng.sample((low, high - low), 2)
            lines.append(f"{a} + {b} = {high}" if kind == "+" else f"{high} - {low} = {high - low}")
            continue
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        if rng.random() < 0.3:
            a = rng.randint(2, 49)
        if a * b > LIMIT:
            continue
        if kind == "*":
            a, b = rng.sample((a, b), 2)
            lines.append(f"{a} * {b} = {a * b}")
        elif a <= 12 and b <= 9:
            lines.append(f"{a * b} / {b} = {a}")
    return "\n".join(lines)
