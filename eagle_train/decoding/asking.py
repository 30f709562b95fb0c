"""Work that stops to ask for what a forward gives, so that one forward can answer several at once.

A `Generator[Asked, Answer, Result]` yields what it asks for, is sent the answer, and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


def answered(work: Generator[Asked, Answer, Result], answer: Callable[[Asked], Answer]) -> Result:
    """Run one piece of work to its end."""
    return answered_together([work], lambda asked: {0: answer(asked[0])})[0]


def answered_together(
    works: Sequence[Generator[Asked, Answer, Result]],
    answer: Callable[[dict[int, Asked]], dict[int, Answer]],
) -> list[Result]:
    """Run all in step; `answer` is given what each one that goes on asks, by its number."""
    results: dict[int, Result] = {}
    asked: dict[int, Asked] = {}

    def go_on(number: int, step: Callable[[], Asked]) -> None:
        try:
            asked[number] = step()
        except StopIteration as end:
            results[number] = end.value

    for number, work in enumerate(works):
        go_on(number, work.__next__)
    while asked:
        answers = answer(asked)
        asked = {}
        for number, found in answers.items():
            go_on(number, partial(works[number].send, found))
    return [results[number] for number in range(len(works))]
