"""Twenty prompts: chat, code, JSON, lists, quotes, other languages."""

from __future__ import annotations

PROMPTS = [
    "Why is the sky blue?",
    "Give me three tips for sleeping better.",
    "Explain to a child what a volcano is.",
    "What is the difference between weather and climate?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a SQL query that counts the orders of each customer.",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n\nFinish this function.",
    "Write a bash one-liner that counts the lines of all .txt files.",
    'Give a JSON object for a book with the keys "title", "author" and "year".',
    "Convert to JSON: name Ada, age 36, languages English and French.",
    "List the planets of the solar system in order.",
    "List ten animals that live in the sea, one a line.",
    "Number the steps for making a cup of tea.",
    'Who said "I think, therefore I am", and what does it mean?',
    'Repeat this sentence exactly: "The quick brown fox jumps over the lazy dog."',
    "Summarise the story of Romeo and Juliet in two sentences.",
    "Traduis en français : Good morning, how are you today?",
    "¿Cuál es la capital de España y qué se puede visitar allí?",
    "Nenn mir drei deutsche Flüsse.",
    "Translate to Czech: The house is big. 你好 means what in English?",
]


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]
