"""The contract suite of stores, ``storage_contract``, for stores of your own. Imports storage_backends and below."""
