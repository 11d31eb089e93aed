"""What a user could train with: a file a way, each with ``build(case, ...)`` that returns a step to take.

All but ``pulse`` are written without anything of this project, as their users would.
"""
