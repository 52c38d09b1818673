"""Plain data types, draft trees and errors that every other package builds on."""
