"""The state of a training besides the data position: variables, callbacks, random generators; when and how it saves."""
