"""The wire's edge: conversion, status codes, and what a request may hold."""
