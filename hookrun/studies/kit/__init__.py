"""The door of the studies: all that a study may use of a run, its data, its directory and its page.

A module for each file of a study: `tasks` for its task, `passes` and `observing` for what it computes, `record_types`
and `files` for its records, `drawing` for its page. Besides these a study imports the engine, `errors` and itself,
never another study.
"""
