"""One folder for each question. A registry finds what is in it; to remove a study, remove its folder.

task.py      the task: a subclass of `Task` with its keys. Imports no torch
records.py   its files, and what a `Run` asks for by the name of a function:
             STREAMS                 file -> the model of its lines, to which the task appends during the run
             lens_of(run), …         what `Run.lens`, … returns
             numbers_to_compare(run), predictions_to_compare(run)   by which two runs are compared
page.py      its section of the report, with `page.html` as its template:
             ID, TITLE               the anchor of the section and its entry in the navigation
             POSITION                its place among the sections of studies, from the top
             build(facts)            the data of the template; None leaves the section out
             read(folder)            lines that the page reads of a file of its own; `facts.of_studies[ID]` has them
All but the task may be missing. What a study computes is in other files of its folder. It imports `studies/kit/`, the
engine, `errors` and itself.
"""
