"""Tasks with a verifier, from reasoning-gym, behind few-shot prompts: questions, and what an answer is
worth.

A prompt is a chat of worked examples (same generator, other seed) ending with the question. All prompts of
a run begin alike but are groups of their own: only responses to the *same* question share a prompt.
"""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from dataclasses import dataclass
from typing import Any

# Generator (behind a colon: a variant's name) and difficulty, such that a model of 135M parameters earns
# something, not everything.
GENERATORS: dict[str, dict[str, Any]] = {
    "word_sorting": {"min_words": 3, "max_words": 3, "max_word_length": 8},
    "letter_counting": {"max_words": 7},
    "letter_counting:short": {"min_words": 2, "max_words": 4},
    "calendar_arithmetic": {},
    "gsm_symbolic": {},
}
EXAMPLES_SEED_OFFSET = 10_000


@dataclass(frozen=True)
class Task:
    """One question: prompt token ids (P,), and the generator's entry that its verifier reads."""

    prompt: tuple[int, ...]
    entry: dict[str, Any]


class TaskSource:
    """Questions of one reasoning-gym generator as few-shot prompts of about `prompt_length` tokens."""

    def __init__(self, name: str, tokenizer: Any, prompt_length: int, num_tasks: int, seed: int) -> None:
        if name not in GENERATORS:
            raise ValueError(f"task must be one of {', '.join(GENERATORS)}, got {name!r}")
        reasoning_gym = self.import_generators()

        def create(size: int, seed: int) -> Any:
            return reasoning_gym.create_dataset(name.split(":")[0], size=size, seed=seed, **GENERATORS[name])

        self._questions = create(num_tasks, seed)
        self._tokenizer = tokenizer
        examples = [e for e in create(400, seed + EXAMPLES_SEED_OFFSET)]
        asked = {e["question"] for e in self._questions}
        examples = [e for e in examples if e["question"] not in asked]
        longest = max((e["question"] for e in self._questions), key=len)
        self._examples = examples[: self._count(examples, longest, prompt_length)]

    @staticmethod
    def import_generators() -> Any:
        """The package reasoning_gym."""
        # It imports this SAT solver, a C extension, for a puzzle generator that is not used here.
        sys.modules.setdefault("pycosat", types.ModuleType("pycosat"))
        import reasoning_gym

        return reasoning_gym

    def _count(self, examples: list[dict[str, Any]], question: str, prompt_length: int) -> int:
        """How many worked examples fit: the largest number whose prompt is within `prompt_length` tokens."""
        low, high = 0, len(examples)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._encode(examples[:middle], question)) <= prompt_length:
                low = middle
            else:
                high = middle - 1
        return low

    def _encode(self, examples: list[dict[str, Any]], question: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None) is None:
            shots = [f"Question: {e['question']}\nAnswer: {e['answer']}\n\n" for e in examples]
            return list(self._tokenizer("".join(shots) + f"Question: {question}\nAnswer:")["input_ids"])
        turns = []
        for example in examples:
            turns.append({"role": "user", "content": example["question"]})
            turns.append({"role": "assistant", "content": example["answer"]})
        turns.append({"role": "user", "content": question})
        text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def num_examples(self) -> int:
        """Worked examples in every prompt."""
        return len(self._examples)

    def tasks(self) -> list[Task]:
        """All questions of the run, as prompts."""
        return [Task(tuple(self._encode(self._examples, e["question"])), e) for e in self._questions]

    def reward(self, task: Task, response: list[int], word_credit: float = 0.0) -> float:
        """The verifier's score in [0, 1] of a response's first line; `word_credit` of it for the right words.

        (1 - word_credit) * score + word_credit * F1 of the answer's and the expected answer's words, in any
        order: a small model earns something before it earns everything.
        """
        text = self._tokenizer.decode(response, skip_special_tokens=True).strip()
        answer = text.split("\n")[0].strip() if text else None
        score = float(self._questions.score_answer(answer, task.entry))
        return (1 - word_credit) * score + word_credit * common_words(answer or "", task.entry["answer"])


def common_words(answer: str, expected: str) -> float:
    """F1 of the words (with how often they occur) of two texts: 1 where they are the same in any order."""
    ours, wanted = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, expected))
    return 2 * (ours & wanted).total() / max(ours.total() + wanted.total(), 1)
