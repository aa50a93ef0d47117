"""The suite judged by backends whose verdict is known: one plain and right, many wrong in one way each."""
