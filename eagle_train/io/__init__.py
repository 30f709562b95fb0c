"""Files and folders that are either whole or not there.

Every record of the project is written through this room, so a killed process or a full disk never leaves
something half-written under a name that a later command reads. From the bottom: `paths.py` says in a
sentence what the operating system refuses; `whole_file.py` and `whole_folder.py` replace a file and a folder
at once; `text.py` and `tensors.py` hold what is written and read back; `creating.py` lets one of many
writers make a file; `checksums.py` names what a file holds.
"""
