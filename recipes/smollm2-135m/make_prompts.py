"""Write training prompts in benchmark-like styles that public instruction sets cover thinly.

Four sources: one-line Python tasks, docstring completion tasks whose examples are computed by running a
reference implementation, open-ended two-turn chat tasks over eight categories, and competition mathematics.
Everything is composed from the word lists and templates below, so the same seed gives the same file.

    python make_prompts.py --output prompts.jsonl --count 4000 --seed 1 --exclude DIR

A line is `{"source": ..., "messages": [{"role": "user", "content": ...}]}`, and `"followups": [...]` holds later
user turns, which can only be used once the target model has answered the first.
"""
# ruff: noqa: E501  (the templates are data, one a line)

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

SHINGLE = 8
SHARES = {"mbpp-style": 0.35, "humaneval-style": 0.25, "mt-bench-style": 0.30, "maths-style": 0.10}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"


@dataclass(frozen=True)
class Prompt:
    source: str
    first: str
    followups: tuple[str, ...] = ()


def lines(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines() if line.strip()]


def items(block: str) -> list[str]:
    return [item.strip() for item in block.replace("\n", " ").split(";") if item.strip()]


# --- the template language: `[[x|y]]` picks one, `<slot>` picks from a word list, never the same word twice, and
# --- `<slot:1>` stands for the same word wherever it occurs

_ALTERNATIVES = re.compile(r"\[\[([^\[\]]*)\]\]")
_SLOT = re.compile(r"<([a-z]+)(:\d)?>")
_ARTICLE = re.compile(r"(?<![\w-])([Aa]) (?=[aeiouAEIOU])(?!uni|use|usu|one|Uni|eu|Eu|UV|US|ubi|uto|Uto)")


def expand(rng: random.Random, template: str, words: dict[str, list[str]]) -> str:
    used: dict[str, set[str]] = {}

    kept: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        slot = match.group(1)
        if match.group() in kept:
            return kept[match.group()]
        taken = used.setdefault(slot, set())
        choice = rng.choice([word for word in words[slot] if word not in taken])
        taken.add(choice)
        if match.group(2):
            kept[match.group()] = choice
        return choice

    text = template
    while True:
        text, alternatives = _ALTERNATIVES.subn(lambda match: rng.choice(match.group(1).split("|")), text)
        text, slots = _SLOT.subn(fill, text)
        if not alternatives and not slots:
            break
    text = _ARTICLE.sub(r"\1n ", text.replace("\\n", "\n"))
    return re.sub(r" {2,}", " ", text).strip()


# --- mbpp-style -------------------------------------------------------------------------------------------------

CODE_WORDS = {
    "nums": items("""a list of integers; an array of integers; a list of numbers; a given list; a tuple of integers;
        a given array; an unsorted array; a list of positive integers; a sorted list of integers"""),
    "listof": items(
        """a list of strings; a list of words; a list of names; a tuple of strings; a given list of strings"""
    ),
    "vpred": items("""that are even; that are odd; that are prime; that are divisible by 3; that are divisible by 7;
        that are multiples of both 2 and 5; that are greater than the average; that appear exactly once;
        that appear more than once; that are perfect squares; that read the same backwards; with an odd digit sum;
        ending in the digit 5; smaller than a given limit; lying between two given bounds;
        that are powers of two; that are negative; that are Fibonacci numbers; with exactly three digits;
        that are not divisible by a given number; whose binary form has an even number of ones;
        that are coprime to a given number"""),
    "position": items("""at even positions; at odd indices; at every third position; in the first half; in the last k places; larger than both of their neighbours;
        that differ from their predecessor by one; between the smallest and the largest element; after the first zero; up to the first negative number"""),
    "pred": ["<vpred>", "<vpred>", "<vpred>", "<position>"],
    "spred": items("""that start with a vowel; that end with a given letter; longer than k characters; with an even length;
        that contain a digit; that are palindromes; without any repeated letter; that start and end with the same letter;
        written entirely in uppercase; that contain a given substring; with more vowels than consonants;
        that appear more than once; that consist only of digits; shorter than the average length"""),
    "agg": items(
        """sum; product; average; maximum; minimum; median; range; number of distinct values; sum of squares; sum of cubes; greatest common divisor"""
    ),
    "kind": items("""vowel; consonant; uppercase letter; lowercase letter; digit; punctuation mark; space; alphabetic character;
        non-alphanumeric character; distinct character; repeated character; word; line"""),
    "kinds": items("""vowels; consonants; uppercase letters; lowercase letters; digits; punctuation marks; spaces;
        duplicate characters; non-alphabetic characters; characters at odd positions; characters at even positions; repeated words;
        parenthesised parts; leading zeros; trailing commas; special characters; html tags; words shorter than k letters; stop words"""),
    "key": items("""first element; second element; last element; sum of the elements; product of the elements; difference of its two elements;
        length; largest element; smallest element; absolute value of the first element; number of even elements; frequency of the first element"""),
    "strkey": items("""length; last character; number of vowels; number of distinct letters; alphabetical order of the reversed strings;
        sum of character codes; number of uppercase letters; trailing number; first digit found in the string"""),
    "sequence": items("""Fibonacci; Lucas; Pell; triangular; pentagonal; heptagonal; octagonal; nonagonal; decagonal; tetrahedral; Catalan; Bell; Motzkin;
        Jacobsthal; Padovan; Perrin; tribonacci; Mersenne; Fermat; happy; lucky; ugly; Smith; Harshad; centered hexagonal; star; pronic; square pyramidal;
        Woodall; Carol; Leonardo; Euler zigzag; polite; evil; odious; abundant; deficient; semiprime; cake; lazy caterer; Kynea; Thabit;
        repunit; centered square; stella octangula; gnomonic; Narayana; Schroder; telephone"""),
    "numkind": items("""prime; perfect; abundant; deficient; Armstrong; happy; a Harshad number; a Smith number; a palindrome; a perfect cube; a perfect square;
        a power of 4; a power of a given base; semiprime; square-free; a triangular number; automorphic; a Kaprekar number; a neon number; pronic; a Disarium number;
        a strong number; a Carmichael number; a Duffinian number; a twin prime with the next odd number; an emirp; a circular prime; a Fibonacci number; a narcissistic number;
        a Keith number; a magic number; a spy number; a sunny number; a tech number; a bouncy number; a pandigital number; a sphenic number; a tau number;
        an Achilles number; a buzz number; a cyclops number; a self number"""),
    "numkindp": items("""prime numbers; perfect numbers; Armstrong numbers; happy numbers; palindromic numbers; perfect squares; perfect cubes; square-free numbers;
        abundant numbers; Harshad numbers; twin primes; semiprimes; triangular numbers; numbers with distinct digits; numbers with an even digit sum; powers of two;
        numbers coprime to n; numbers whose digits are in increasing order; numbers divisible by the sum of their digits; numbers with exactly four divisors;
        numbers that can be written as a sum of two squares; multiples of 3 or 5; Fibonacci numbers; numbers without the digit 7"""),
    "shape": items("""triangle given its three sides; trapezoid; rhombus given its diagonals; parallelogram; regular pentagon; regular hexagon; circle given its diameter;
        ellipse; annulus; circular sector; circular segment; kite; polygon given its vertices; isosceles triangle; right triangle given its legs; semicircle;
        regular octagon; square inscribed in a circle; equilateral triangle given its height; circle inscribed in a square"""),
    "solid": items("""cube; cuboid; cone; cylinder; hollow cylinder; sphere; hemisphere; square pyramid; triangular prism; regular tetrahedron; torus; frustum of a cone;
        spherical cap; octahedron; hexagonal prism; ellipsoid; capsule; pentagonal pyramid"""),
    "solidprop": items(
        """volume; total surface area; lateral surface area; space diagonal or slant height; weight for a given density"""
    ),
    "unit": items("""kilometres to miles; celsius to fahrenheit; fahrenheit to kelvin; degrees to radians; hours and minutes to seconds; seconds to an hh:mm:ss string;
        bytes to a human readable size; roman numerals to integers; integers to roman numerals; binary strings to decimal; decimal numbers to hexadecimal; octal numbers to binary;
        rgb colours to hex codes; hex colour codes to rgb tuples; 12-hour times to 24-hour times; pounds to kilograms; litres to gallons; polar to cartesian coordinates;
        camel case to snake case; snake case to kebab case; title case to camel case; text to pig latin; text to morse code; ascii codes to characters;
        numbers to words; numbers to a comma separated string; dates from yyyy-mm-dd to dd/mm/yyyy; excel column titles to numbers; a decimal fraction to a reduced fraction;
        gray code to binary; a number to balanced ternary; a number to base 7"""),
    "valid": items("""a valid email address; a valid ipv4 address; a valid ipv6 address; a mac address; a us phone number; a postal code; a valid hex colour; a date in yyyy-mm-dd format; a 24-hour time; a valid python identifier; a strong password; a url with an https scheme;
        a number in scientific notation; a floating point number with at most two decimals; a username of 3 to 16 characters; a semantic version; a credit card number with dashes; a word of exactly five letters; a roman numeral; a binary number; a licence plate of three letters and three digits; a file name with an image extension"""),
    "pattern": items("""words that start with a capital letter; an x followed by two or more y's; two consecutive vowels; words repeated twice in a row; lowercase letters joined with a hyphen; text inside double quotes; text within square brackets; hashtags; comment lines; whitespace at the end of lines;
        words of exactly five letters; numbers with a decimal point; prices with a dollar sign; times such as 9:30; dates in dd/mm/yyyy format; email addresses; urls; three or more equal characters in a row; an optional sign followed by digits; abbreviations in capital letters; words that end with ing"""),
    "dict": items(
        """a dictionary; a given dictionary; a dictionary of numbers; a nested dictionary; a dictionary of scores"""
    ),
    "dictop": items("""invert the keys and values of <dict>; sort <dict> by value in descending order; sort <dict> by the length of its keys; remove all entries with empty values from <dict>; find the key with the largest value in <dict>;
        find the top k keys by value in <dict>; drop the keys that start with an underscore from <dict>; flatten <dict> into one level with dotted keys; group the keys of <dict> by their values; round all float values in <dict>; find the average of the values in <dict>;
        count the values of each type in <dict>; filter out the entries of <dict> whose value is below a threshold; rename a key in <dict>; find all keys of <dict> that map to a given value; swap the first and last entries of <dict>; check whether all the values of <dict> are equal;
        check whether any key of <dict> maps to itself; multiply all the values in <dict>; find the depth of <dict>; convert <dict> to a list of tuples; find the longest key in <dict>; split <dict> into two halves; convert the keys of <dict> to lower case; replace missing values in <dict> with a default;
        find the differences between two versions of <dict>; build <dict> from two lists; pick a given set of keys from <dict>; count the even values in <dict>; find the smallest and the largest value in <dict>"""),
    "matrixop": items("""transpose <matrix>; find the trace of <matrix>; rotate <matrix> by 90 degrees clockwise; traverse <matrix> in spiral order; find the sum of both diagonals of <matrix>; find the row with the largest sum in <matrix>; sort each row of <matrix>; print the boundary elements of <matrix>;
        find the saddle point of <matrix>; count the zeros in <matrix>; check whether <matrix> is symmetric; find the maximum of every column of <matrix>; multiply <matrix> by a scalar; find the determinant of <matrix>; search for a value in <matrix> whose rows and columns are sorted; replace each entry of <matrix> by the sum of its neighbours;
        flip <matrix> horizontally; find the number of islands in <matrix>; set to zero the rows and columns of <matrix> that contain a zero; find the path of minimum cost from the top left to the bottom right of <matrix>; traverse <matrix> in zigzag order; find the largest square of ones in <matrix>; swap the first and last columns of <matrix>;
        find the common elements of all rows of <matrix>; check whether <matrix> is an identity matrix; count the negative numbers in <matrix>; find the median of <matrix>; remove the duplicate rows of <matrix>; check whether <matrix> is a magic square; multiply two matrices; raise <matrix> to the power n; find the rank of <matrix>;
        reshape <matrix> to a given number of columns; find the row of <matrix> with the most ones; sort the rows of <matrix> by their last element; check whether <matrix> is upper triangular; print <matrix> column by column; find the maximum path sum in <matrix>; sum the entries above the main diagonal of <matrix>; shift the rows of <matrix> down by one"""),
    "matrix": items(
        """a given matrix; a square matrix; a 2d list; a matrix given as a list of lists; an m x n matrix of integers; a binary matrix"""
    ),
    "dptask": items("""the longest increasing subsequence; the longest common subsequence of two strings; the longest common substring of two strings; the longest palindromic substring; the longest palindromic subsequence; the longest bitonic subsequence;
        the maximum sum of a contiguous subarray; the maximum product of a contiguous subarray; the largest sum of non-adjacent elements; the longest run of equal elements; the longest subarray with sum k; the shortest subarray with a sum of at least k;
        the longest substring without repeating characters; the largest rectangle under a histogram; the smallest window that contains all given characters; the longest alternating subsequence; the longest arithmetic progression; the longest chain of pairs;
        the shortest common supersequence; the longest consecutive run of integers; the longest balanced parentheses substring; the longest word that can be built from other words; the longest mountain in an array; the longest subarray with equal zeros and ones"""),
    "dpin": items(
        """in a given list; in an array; using dynamic programming; efficiently; and return its length; and return it"""
    ),
    "ways": items("""to climb n stairs taking 1, 2 or 3 steps; to make change for an amount with given coins; to tile a 2 x n board with dominoes; to tile a 3 x n board with 3 x 1 tiles; to reach the bottom right of a grid moving right or down;
        to decode a string of digits as letters; to partition n into distinct parts; to partition a set of n elements into k subsets; to parenthesise n factors; to place n queens on a board; to arrange n people around a table;
        to choose r items out of n with repetition; to write n as a sum of powers of two; to colour a fence of n posts with k colours; to pair up n friends or leave them single; to split a string into palindromes; to reach a target sum by assigning signs;
        to roll a total of s with d dice; to interleave two strings; to write n as an ordered sum of odd numbers; to move through a grid with obstacles; to score n points with 3, 5 and 10 point shots"""),
    "heap": items("""find the k largest elements of an unsorted list; find the k smallest elements of a list; merge k sorted lists into one sorted list; find the k most frequent words in a text; find the running median of a stream of numbers;
        sort a nearly sorted list; find the k closest points to the origin; find the k pairs with the smallest sums from two sorted lists; find the kth largest product of two elements; connect ropes at minimum total cost; get the n cheapest products from a list of dictionaries;
        schedule tasks by priority; reorganise a string so that no two adjacent characters are equal; find the smallest range that covers an element of each list; sort a dictionary of scores and keep the best k; find the kth smallest element of a sorted matrix"""),
    "bit": items("""count the set bits of a number; toggle the kth bit of a number; set the rightmost unset bit; clear the lowest set bit; check whether two numbers differ at exactly one bit; swap the nibbles of a byte; reverse the bits of a 32-bit integer;
        find the position of the only set bit; toggle all bits between two positions; check whether the bits of a number alternate; find the xor of all numbers from 1 to n; find the two elements that occur an odd number of times using xor; count the bits to flip to turn one number into another;
        rotate the bits of a number to the left; find the highest power of two that divides a number; check whether the kth bit is set; find the parity of a number; multiply two numbers without the multiplication operator; add two integers using only bitwise operators; compute the bitwise and of a range of numbers;
        find the most significant set bit; check whether a number has two adjacent set bits; swap the odd and even bits of an integer; find the maximum xor of two numbers in a list; find the next larger number with the same number of set bits; turn off all but the last k bits of a number"""),
    "formula": items("""compound interest for a principal, rate and time; simple interest; the monthly payment of a loan; the body mass index; the distance between two points in 3d space; the great-circle distance between two coordinates; the midpoint of a line segment; the slope of a line through two points;
        the roots of a quadratic equation; the nth term of an arithmetic progression; the sum of a geometric progression; the harmonic mean of two numbers; the geometric mean of a list; the standard deviation of a list; the variance of a list; the mode of a list; the weighted average of values and weights;
        the correlation of two lists; the dot product of two vectors; the cross product of two 3d vectors; the angle between two vectors; the greatest common divisor of a list; the least common multiple of a list; the binomial coefficient modulo a prime; modular exponentiation; the modular inverse of a number;
        the number of trailing zeros of n factorial; the digital root of a number; the sum of the digits of n factorial; Euler's totient of a number; the number of divisors of n; the sum of the proper divisors of n; the largest prime factor of n; the integer square root of n; the cube root of a number by bisection;
        the area of the intersection of two rectangles; the sum of the series 1 + 1/2 + 1/3 + ... + 1/n; the sum of the first n even squares; the sum of the first n odd cubes; the alternating sum of the first n natural numbers; the day of the week of a date; the number of days between two dates; whether a year is a leap year;
        the final price after two successive discounts; the average speed of a trip with several legs; the gcd and lcm of two fractions; the wind chill; the kinetic energy of a body; the resistance of resistors in parallel; the median of two sorted lists; the hypotenuse of a right triangle; the angle between clock hands; the Hamming distance of two strings; the edit distance of two strings; the Collatz sequence length of n;
        the nth row of Pascal's triangle; the value of a polynomial by Horner's rule; the derivative of a polynomial given as a coefficient list; the product of two polynomials; the continued fraction of a rational number; the Gini coefficient of a list of incomes; the exponential moving average of a series; the perimeter of a polygon; the circumcircle radius of a triangle; the sum of the main and the secondary diagonal"""),
    "sortalgo": items(
        """bubble sort; insertion sort; merge sort; heap sort; counting sort; radix sort; shell sort; comb sort; cocktail shaker sort; gnome sort; cycle sort; pancake sort; bucket sort; selection sort; quicksort with a random pivot; odd-even sort; tim sort in a simplified form; stooge sort"""
    ),
    "sortwhat": items(
        """a list of numbers; a list of strings by length; a list of tuples by their second element; a list of dates; a list of floats in descending order; a list of student records by grade; a linked list"""
    ),
    "searchalgo": items(
        """binary search; interpolation search; jump search; exponential search; ternary search; linear search with a sentinel; fibonacci search"""
    ),
    "searchwhat": items(
        """the first occurrence of a value in a sorted list; the last occurrence of a value in a sorted list; the insertion point of a value; a peak element; the index of a number in a sorted array; the smallest element not less than x"""
    ),
    "join": items(
        """a hyphen; a comma; a semicolon; an underscore; a single space; a newline; an arrow; a given separator"""
    ),
    "structure": items(
        """list; tuple; nested list; dictionary; string; set; deque; nested tuple; list of tuples; list of dictionaries; tuple of lists"""
    ),
    "pairrel": items(
        """whose sum is equal to a given number; whose difference is k; whose product is divisible by 6; whose sum is odd; whose xor is zero; with the smallest absolute difference; with the largest product; whose sum is closest to zero; whose gcd is one; where the first divides the second; whose sum is a perfect square; whose sum is a prime number; that are anagrams of each other; that share no digit"""
    ),
    "group": items("""pairs; triplets; adjacent pairs"""),
    "graph": items("""find the shortest path in an unweighted graph; detect a cycle in a directed graph; detect a cycle in an undirected graph; count the connected components of a graph; sort the nodes of a dag topologically; check whether a graph is bipartite; find the shortest distances with Dijkstra's algorithm; build a minimum spanning tree with Kruskal's algorithm;
        find the height of a binary tree; check whether a binary tree is balanced; find the lowest common ancestor of two nodes in a binary search tree; print a binary tree level by level; check whether a binary tree is a search tree; count the leaves of a binary tree; find the diameter of a tree given as an adjacency list; invert a binary tree; find the sum of all root-to-leaf paths; reverse a singly linked list; find the middle of a linked list; remove the nth node from the end of a linked list;
        detect a loop in a linked list; merge two sorted linked lists; implement a queue with two stacks; implement a stack that returns its minimum in constant time; evaluate a postfix expression; convert an infix expression to postfix; check whether brackets are balanced in an expression; find the next greater element of every element; implement an lru cache; build a trie from a list of words; find all permutations of a string; generate all subsets of a list; generate all balanced strings of n pairs of parentheses; solve a sudoku board; solve the tower of Hanoi; find all combinations that sum to a target"""),
    "lam": items(
        """using a lambda function; using list comprehension; using recursion; without using built-in functions; using the collections module; using itertools; using the filter function; using the map function; using the reduce function; using regex; in linear time; using a set; using a while loop; using slicing"""
    ),
    "transform": items(
        """squares; cubes; absolute values; reciprocals; digit sums; binary strings; cumulative sums; ranks; differences from the mean; factorials; running maxima; prefix products; signs; halves rounded down"""
    ),
    "listop": items("""rotate <nums> to the left by k places; rotate <nums> to the right by k places; split <nums> into chunks of size k; move all zeros in <nums> to the end; move all negative numbers in <nums> to the front; swap the first and last elements of <nums>; reverse <nums> in groups of k; remove consecutive duplicates from <nums>; remove every kth element from <nums>;
        insert an element before each element of <nums>; interleave two lists of the same length; interleave three lists into one; find the symmetric difference of two lists; find the elements common to three sorted lists; find the missing number in <nums>; find all missing numbers in a range for <nums>; find the equilibrium index of <nums>; find the majority element of <nums>; find the second largest element of <nums>; find the second smallest distinct element of <nums>;
        count the inversions in <nums>; check whether <nums> is sorted in non-increasing order; check whether <nums> is a rotation of another list; check whether <nums> contains consecutive numbers only; check whether two lists are permutations of each other; check whether one list is a subsequence of another; find the leaders in <nums>; find the pivot of a rotated sorted array; find the first repeated element in <nums>; find the first element that does not repeat in <nums>;
        pack consecutive duplicates of <nums> into sublists; encode <nums> with run-length encoding; decode a run-length encoded list; flatten a nested list of any depth; find the maximum depth of a nested list; zip two lists into a dictionary; split <nums> into even and odd numbers; partition <nums> around a pivot; find the minimum number of swaps to sort <nums>; find the maximum gap between sorted neighbours in <nums>; find the largest number that can be formed from <nums>; pad lists of different lengths with zeros;
        find the cartesian product of two lists; find the frequency of each element in <nums>; remove all duplicates from <nums> while keeping the order; shuffle a list so that the two halves alternate; find the index of the smallest element of <nums>; find the local minima of <nums>; add a number to every element of <nums>; find the element-wise maximum of two lists; subtract two lists element-wise; find the moving average of <nums> with window k; find the longest sublist in a list of lists; sort each sublist of a list of lists; sum the sublists of a nested list; find the sublist with the largest sum in a list of lists;
        remove the sublists that are outside a given range; sort <nums> by the frequency of its elements; sort <nums> so that odd numbers come before even numbers; arrange <nums> in wave form; arrange <nums> in alternating positive and negative numbers; find the maximum profit from one purchase and one sale; find the water trapped between bars of given heights; find the minimum number of platforms for given arrival and departure times; merge overlapping intervals; find the gaps between intervals; check whether any two intervals overlap"""),
    "strop": items("""reverse the words in a string; reverse each word of a sentence; capitalise the first and last letter of each word; swap the case of every letter in a string; check whether two strings are anagrams; check whether a string is a pangram; check whether a string is a rotation of another string; check whether a string is an isogram; check whether a string has balanced quotes; find the first non-repeating character in a string; find the most frequent character in a string;
        find the longest word in a sentence; find the shortest word in a sentence; count the words in a sentence that start with a capital letter; find the longest common prefix of a list of strings; compress a string by counting repeated letters; expand a string such as 'x3y2' to its full form; encrypt a string with a caesar cipher; decrypt a string shifted by k letters; encode a text with the rail fence cipher; apply the vigenere cipher to a text; remove adjacent duplicates from a string until none are left;
        insert a character after every n characters of a string; split a string at uppercase letters; split a string at the first digit; extract all numbers from a string; sum all the numbers found in a string; extract the words between two given words; count the occurrences of a substring in a string with overlaps; find all positions of a pattern in a string; find the lexicographically smallest rotation of a string; find the minimum number of insertions to make a string a palindrome; check whether a string can be rearranged into a palindrome; find the number of distinct substrings of a string;
        replace multiple spaces in a string with one; replace each letter by its position in the alphabet; sort the characters of a string by frequency; sort the words of a sentence by length; sort the digits of a number in descending order; remove the characters of one string from another string; merge two strings alternately; mask all but the last four characters of a string; truncate a string to n words; wrap a text to a given width; centre a string in a given width; count how many letters must change to make two strings equal; find the common letters of two strings; check whether a string follows a given pattern of letters; check whether a string starts and ends with the same character;
        convert a string to a list of characters; convert a list of characters to a string; find the ascii value of the largest character in a string; find words that appear in one sentence but not in the other; remove the kth word of a sentence; remove the last n characters of a string; get the acronym of a phrase; find the number of syllables in a word; validate a string of brackets; check whether a sentence has every word capitalised; repeat each character of a string twice; toggle the characters at even positions; find the next lexicographic permutation of a string; check whether a string is a subsequence of another; format a list of names as 'x, y and z'; find the length of the last word in a string"""),
    "tupop": items(
        """swap the elements of each tuple in a list; add a list to a tuple; remove the empty tuples from a list; find the element-wise sum of two tuples; find the element-wise product of nested tuples; convert a tuple of digits to an integer; convert a list of tuples to a dictionary; check whether all tuples in a list have the same length; check whether a tuple contains only positive elements; find the maximum difference between the pairs in a tuple list; sort the elements inside each tuple of a list; find the tuples that contain a given element; count the tuples with a sum above a limit; group a tuple list by the second element; remove duplicate tuples irrespective of order; join the tuples that have the same first element; find the average of each column of a tuple of tuples; extract the nth element of each tuple in a list; find the tuple with the smallest second element; repeat a tuple n times; slice a tuple from a given index; reverse a tuple; multiply adjacent elements of a tuple; convert a nested tuple to a flat list; concatenate the strings in a tuple with <join>; check whether a tuple is a subset of another; find the index of an element in a tuple; unzip a list of pairs into two lists; replace the last value of every tuple in a list; filter the tuples whose elements are all divisible by k; find the tuples with the same product; rank the tuples in a list by the sum of their elements; find the intersection of two lists of tuples"""
    ),
    "numop": items(
        """reverse the digits of an integer; count the digits of a number; find the largest digit of a number; find the product of the non-zero digits of a number; find the difference between the sum of even and odd digits of a number; check whether the digits of a number are in ascending order; find the smallest number with a given digit sum; find the largest number that can be made by deleting one digit; find the next palindrome after a number; find the next prime after n; find the smallest multiple of n that uses only the digits 0 and 1; express a number as a product of primes; express an even number as a sum of two primes; express a number as a sum of consecutive integers; find the smallest number divisible by all numbers from 1 to n; find the nth digit of the concatenated natural numbers; round a number to the nearest multiple of k; swap two numbers without a temporary variable; find the sum of the digits at odd places; check whether a number is divisible by each of its digits; check whether the sum of the first half of the digits equals that of the second half; count the numbers below n that contain the digit 3; count the integers in a range with no repeated digits; find the number of steps to reduce n to zero; find the minimum number of squares that sum to n; find the nth number that is divisible by neither 2 nor 3; find the largest power of k not above n; find the sum of all divisors common to two numbers; find the number of ordered pairs with a given lcm; find the last digit of a power; find the last two digits of the nth Fibonacci number; find the first digit of n factorial; split a number into its place values; check whether three numbers form a pythagorean triple; check whether three sides form a valid triangle; classify a triangle by its sides; find the quadrant of a point; check whether a point lies inside a circle; check whether a point lies inside a triangle; check whether three points are collinear; check whether two circles intersect; find the closest pair of points in a list; find the number of squares in an n x n grid; find the number of diagonals of a polygon with n sides; find the interior angle of a regular polygon; find the number of lattice points on a circle; find the area covered by overlapping rectangles; find the third angle of a triangle; find the missing side of a right triangle; rotate a point around the origin; reflect a point in a line; find the distance of a point from a line; find the intersection of two lines; find the centroid of a triangle; build a convex hull of a list of points"""
    ),
}

MBPP_INFINITIVES = lines("""
find the <agg> of the elements <pred> in <nums>
count the elements <pred> in <nums>
[[remove|filter out|drop]] the elements <pred> from <nums>
[[extract|collect|return]] the elements <pred> from <nums>
find the [[first|last|largest|smallest|second largest]] of the numbers <vpred> in <nums>
find the [[positions|indices]] of the elements <vpred> in <nums>
check whether <nums> contains [[any|only|at least two|exactly one of the]] numbers <vpred>
replace the elements <pred> in <nums> with [[zero|their index|the average|their negative|none]]
split <nums> into the numbers <pred> and the rest
find the <agg> of the <transform> of <nums>
find the <transform> of the numbers <pred> in <nums> <lam>
sort <nums> by [[digit sum|last digit|number of divisors|absolute value|number of set bits|remainder modulo k|distance from a given value|binary length|largest prime factor|number of digits]]
count the strings <spred> in <listof>
remove the strings <spred> from <listof>
find the [[longest|shortest|first|last]] of the strings <spred> in <listof>
extract the strings <spred> from <listof> <lam>
join the strings <spred> in <listof> with <join>
sort <listof> by <strkey>
group <listof> by <strkey>
find the total length of the words <spred> in a sentence
count the number of <kinds> in a given string
remove all <kinds> from a given string [[||<lam>]]
replace all <kinds> in a string with <join>
find the index of the [[first|last]] <kind> in a string
check whether a string contains [[at least one|more than one|exactly three of any|no]] <kind>
find the [[percentage|positions|number]] of <kinds> in a text
sort a list of [[tuples|lists|pairs]] by the <key> of each [[tuple|item|entry]]
group a list of tuples by the <key>
find the [[tuple|sublist]] with the [[largest|smallest]] <key> in a list
filter a list of tuples so that only those with a distinct <key> remain
find the nth <sequence> number
[[print|generate|return]] the first n <sequence> numbers
check whether a number is a <sequence> number
find the sum of the first n <sequence> numbers
find the [[smallest|largest]] <sequence> number [[greater|less]] than n
check whether a given number is <numkind> [[|||or not]]
count the <numkindp> [[below n|between two given numbers|up to a limit]]
find the [[sum|product|list|average]] of the <numkindp> [[below n|in a given range|up to n]]
find the nth of the <numkindp>
find the area of a <shape>
find the perimeter of a <shape>
find the <solidprop> of a <solid>
convert <unit>
check whether a string is <valid> [[|using regex|with a regular expression]]
check whether a string contains <pattern> [[|using regex|with a regular expression]]
find all <pattern> in a text using regex
[[count|remove|extract]] <pattern> in a text [[|using regex|with a regular expression]]
replace <pattern> in a text with <join> [[|using regex]]
<dictop>
<dictop> <lam>
merge two dictionaries by [[adding the values of common keys|keeping the larger value|joining the values into lists|preferring the second one|keeping only the common keys|concatenating their string values]]
count the [[letters|words|digits|bigrams|first letters|line lengths|vowels]] of a text in a dictionary [[|<lam>]]
<matrixop>
<matrixop>
find <dptask> <dpin>
find the length of <dptask>
count the number of ways <ways>
find the minimum [[cost|number of steps|number of coins|number of jumps|number of edits|number of deletions]] to [[make change for an amount|reach the end of an array|turn one string into another|make a string a palindrome|sort a list|cut a stick at given places|paint n houses with three colours|make all elements equal|merge piles of stones|reduce a number to one|balance a string of brackets]]
<heap>
<heap> using the heapq module
<bit>
calculate <formula>
find <formula> [[|<lam>]]
sort <sortwhat> using <sortalgo>
find <searchwhat> using <searchalgo>
count the <group> of numbers <pairrel> in <nums>
find all <group> of numbers <pairrel> in <nums>
check whether there are two numbers <pairrel> in <nums>
convert a <structure> to a <structure>
check whether two [[lists|tuples|sets|dictionaries|strings|matrices]] are [[equal up to order|disjoint|identical|of the same length|equal when reversed|equal in all but one place|equal ignoring case]]
find the [[union|intersection|difference|symmetric difference]] of two [[lists|tuples|arrays|sets of strings|lists of tuples|nested lists]] [[|||<lam>|while keeping duplicates|in sorted order]]
<graph>
<listop>
<listop> <lam>
<strop>
<strop> <lam>
<tupop>
<tupop> <lam>
<numop>
<listop>
<strop>
<numop>
remove [[none values|empty strings|nan values|negative numbers|nested lists|a given element|the first and last elements|duplicates|all strings|elements with odd frequency]] from a <structure>
count how often [[a given element|each word|the largest value|each type|every pair of neighbours|a sublist]] occurs in a <structure>
find the [[maximum|minimum|sum|product|average|most common value|number]] of all [[integers|numbers|unique values|floats|even numbers|nested values]] in a <structure> [[|of mixed types]]
""")

MBPP_TAKES = lines("""
[[a list of integers|a list of numbers|a tuple of integers|a sorted list]]@[[the <agg> of the numbers <vpred>|a list of the numbers <vpred>|True if it contains numbers <vpred>, else False|the number of pairs <pairrel>|the list with the numbers <vpred> removed|a dictionary from each number to its frequency|the <transform> of its elements|the elements <vpred> in reverse order|a tuple with the smallest and largest of the numbers <vpred>]]
[[a string|a sentence|a text|a string and a character]]@[[the string without <kinds>|the number of <kinds>|a dictionary with the count of every <kind>|the words <spred>|the longest of the words <spred>|True if it holds more <kinds> than digits|the string with all <kinds> replaced by <join>|the number of words <spred>|the string with its words <spred> reversed|the string with its words <spred> in uppercase]]
[[a list of strings|a list of words]]@[[the strings <spred>|the number of strings <spred>|a dictionary that groups them by <strkey>|the strings sorted by <strkey>|the strings <spred> joined with <join>|the indices of the strings <spred>]]
[[an integer n|a positive integer|a number n]]@[[the list of <numkindp> up to it|the number of <numkindp> below it|True if it is <numkind>|the nth <sequence> number|the sum of the <numkindp> below it|the nearest <sequence> number|the smallest of the <numkindp> above it]]
[[a list of tuples|a list of pairs|a tuple of tuples]]@[[the tuples sorted by the <key>|the tuple with the largest <key>|a dictionary that maps the <key> to the tuples|the sum of the first elements|the tuples with an even <key>|the number of tuples with a positive <key>]]
[[the dimensions of|the measurements of]] a <solid>@[[its <solidprop>|a tuple with its volume and surface area]]
[[a dictionary|a dictionary of lists|a dictionary of scores]]@[[the keys sorted by value|the key with the longest value|a new dictionary with keys and values swapped|the entries with numbers <vpred>|the keys <spred>|the <agg> of its values|a copy without the keys <spred>]]
[[a square matrix|a matrix|a list of lists]]@[[the sum of the numbers <vpred>|the row with the most numbers <vpred>|the <agg> of each column|the <agg> of each row|the matrix with the numbers <vpred> set to zero|the position of the first of the numbers <vpred>|the number of columns that hold only numbers <vpred>]]
""")


def third_person(verb: str) -> str:
    return verb + ("es" if verb.endswith(("ch", "sh", "ss", "x")) else "s")


def mbpp(rng: random.Random) -> Prompt:
    python = rng.choice(["", "", "python "])
    if rng.random() < 0.22:
        given, result = expand(rng, rng.choice(MBPP_TAKES), CODE_WORDS).split("@")
        takes = rng.choice(["takes in", "takes in", "takes", "accepts"])
        text = f"Write a {python}function that {takes} {given} and returns {result}."
    else:
        task = expand(rng, rng.choice(MBPP_INFINITIVES), CODE_WORDS)
        if rng.random() < 0.06 and " and " not in task:
            verb, rest = task.split(" ", 1)
            text = f"Write a {python}function that {third_person(verb)} {rest}."
        else:
            text = f"Write a {python}function to {task}."
    return Prompt("mbpp-style", text)


# --- humaneval-style --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """`args` are (possible names, type) pairs; `doc` refers to the chosen names as {a}, {b}, {c}."""

    names: str
    args: tuple[tuple[str, str], ...]
    returns: str
    doc: str
    solve: Callable[..., Any]
    inputs: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Piece:
    """A part of a composed problem: `slug` goes into the function name, `text` into the docstring."""

    slug: str
    text: str
    apply: Callable[[Any], Any]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def digits(n: int) -> list[int]:
    return [int(digit) for digit in str(abs(n))]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def runs(values: Iterable[Any]) -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


VOWELS = "aeiou"
NOUNS = items("""apple; river; level; orange; banana; stone; kayak; Idea; window; garden; moon; noon; Umbrella; tree; cloud; engine; radar; bridge; letter; copper;
    Echo; island; summer; tiger; violin; bottle; planet; civic; Autumn; otter; basket; mirror; pepper; lantern; valley; olive; refer; wagon; needle; harbor""")


def some_ints(rng: random.Random, low: int = -20, high: int = 60, most: int = 8) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(3, most))]


def some_words(rng: random.Random, most: int = 5) -> list[str]:
    return rng.sample(NOUNS, rng.randint(2, most))


def letters(rng: random.Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def numbers_problem(rng: random.Random) -> Problem:
    k, t, d = rng.choice([3, 4, 5, 6, 7, 9]), rng.choice([5, 8, 10, 12, 15, 20, 25]), rng.randint(1, 9)
    keep = rng.choice(
        [
            Piece("even", "that are even", lambda n: n % 2 == 0),
            Piece("odd", "that are odd", lambda n: n % 2 == 1),
            Piece("positive", "that are positive", lambda n: n > 0),
            Piece("negative", "that are negative", lambda n: n < 0),
            Piece(f"multiples_of_{k}", f"that are divisible by {k}", lambda n: n % k == 0),
            Piece(f"above_{t}", f"that are greater than {t}", lambda n: n > t),
            Piece(f"below_{t}", f"that are less than {t}", lambda n: n < t),
            Piece("prime", "that are prime", is_prime),
            Piece("square", "that are perfect squares", lambda n: n >= 0 and math.isqrt(n) ** 2 == n),
            Piece(f"ending_in_{d}", f"whose last decimal digit is {d}", lambda n: digits(n)[-1] == d),
            Piece("even_digit_sum", "whose digits add up to an even number", lambda n: sum(digits(n)) % 2 == 0),
            Piece(
                "two_digit",
                "with exactly two digits (the sign does not count)",
                lambda n: len(digits(n)) == 2,
            ),
            Piece("far_from_zero", f"at a distance of more than {t} from zero", lambda n: abs(n) > t),
            Piece("odd_digits", "made of odd digits only", lambda n: all(x % 2 for x in digits(n))),
        ]
    )
    change = rng.choice(
        [
            Piece("", "", lambda n: n),
            Piece("", "", lambda n: n),
            Piece("squares_of_", "the squares of ", lambda n: n * n),
            Piece("doubled_", "the doubles of ", lambda n: 2 * n),
            Piece("absolute_", "the absolute values of ", abs),
            Piece("digit_sums_of_", "the digit sums of ", lambda n: sum(digits(n))),
            Piece("last_digits_of_", "the last digits of ", lambda n: digits(n)[-1]),
            Piece("cubes_of_", "the cubes of ", lambda n: n**3),
        ]
    )
    finish, returns, empty = rng.choice(
        [
            (Piece("sum", "the sum of", sum), "int", "0"),
            (Piece("product", "the product of", math.prod), "int", "1"),
            (Piece("largest", "the largest of", lambda v: max(v, default=-1)), "int", "-1"),
            (Piece("smallest", "the smallest of", lambda v: min(v, default=-1)), "int", "-1"),
            (Piece("sorted", "an ascending list of", sorted), "List[int]", "an empty list"),
            (
                Piece(
                    "descending",
                    "a list, from the largest to the smallest, of",
                    lambda v: sorted(v, reverse=True),
                ),
                "List[int]",
                "an empty list",
            ),
            (Piece("list_of", "a list, in the original order, of", list), "List[int]", "an empty list"),
            (Piece("distinct", "the number of distinct values among", lambda v: len(set(v))), "int", "0"),
            (
                Piece(
                    "spread_of",
                    "the difference between the largest and the smallest of",
                    lambda v: max(v) - min(v) if v else 0,
                ),
                "int",
                "0",
            ),
            (
                Piece(
                    "alternating_sum_of",
                    "the alternating sum (first minus second plus third and so on) of",
                    lambda v: sum((-1) ** i * x for i, x in enumerate(v)),
                ),
                "int",
                "0",
            ),
            (
                Piece(
                    "running_sums_of",
                    "the list of running sums of",
                    lambda v: [sum(v[: i + 1]) for i in range(len(v))],
                ),
                "List[int]",
                "an empty list",
            ),
            (
                Piece(
                    "first_and_last",
                    "a tuple with the first and the last of",
                    lambda v: (v[0], v[-1]) if v else (),
                ),
                "tuple",
                "an empty tuple",
            ),
        ]
    )
    if change.slug.startswith(("absolute", "doubled", "cubes")) and finish.slug == "product":
        finish, returns, empty = Piece("sum", "the sum of", sum), "int", "0"
    noun = rng.choice(["numbers", "elements", "values", "integers"])
    doc = rng.choice(
        [
            f"Given a list of integers {{a}}, return {finish.text} {change.text}the {noun} {keep.text}. If there are none, return {empty}.",
            f"Return {finish.text} {change.text}those {noun} of {{a}} {keep.text}, or {empty} when no such {noun[:-1]} exists.",
            f"You are given a list {{a}} of whole numbers. Look only at the {noun} {keep.text} and ignore the rest. Return {finish.text} {change.text}these {noun}. The answer is {empty} if nothing is left.",
            f"{{a}} is a list of integers. Compute {finish.text} {change.text}the {noun} in it {keep.text}. For a list without such {noun}, the result is {empty}.",
        ]
    )
    lists = [some_ints(rng) for _ in range(12)]
    good = [xs for xs in lists if any(keep.apply(x) for x in xs)][: rng.randint(2, 3)]
    if rng.random() < 0.4:
        good.append(rng.choice([[], [1]]))
    slug = f"{finish.slug}_{change.slug}{keep.slug}"
    return Problem(
        f"{slug};{slug}_numbers;{finish.slug}_{keep.slug}_only;{finish.slug}_selected;get_{slug}",
        (("nums;numbers;xs;lst;values;arr", "List[int]"),),
        returns,
        doc,
        lambda xs: finish.apply([change.apply(x) for x in xs if keep.apply(x)]),
        [(xs,) for xs in good],
    )


def words_problem(rng: random.Random) -> Problem:
    k, c = rng.choice([4, 5, 6]), rng.choice("aeilnrt")
    keep = rng.choice(
        [
            Piece("vowel_words", "that start with a vowel", lambda w: w[0].lower() in VOWELS),
            Piece("consonant_words", "that start with a consonant", lambda w: w[0].lower() not in VOWELS),
            Piece(f"long_{k}", f"longer than {k} characters", lambda w: len(w) > k),
            Piece(f"with_{c}", f"that contain the letter '{c}' (in either case)", lambda w: c in w.lower()),
            Piece(
                f"without_{c}",
                f"that do not contain the letter '{c}' (in either case)",
                lambda w: c not in w.lower(),
            ),
            Piece(
                "palindromes",
                "that read the same from both ends when case is ignored",
                lambda w: w.lower() == w.lower()[::-1],
            ),
            Piece("even_length", "with an even number of characters", lambda w: len(w) % 2 == 0),
            Piece("odd_length", "with an odd number of characters", lambda w: len(w) % 2 == 1),
            Piece("capitalised", "that begin with a capital letter", lambda w: w[0].isupper()),
            Piece(
                "all_distinct",
                "in which no letter occurs twice, ignoring case",
                lambda w: len(set(w.lower())) == len(w),
            ),
            Piece(
                "double_letters",
                "with two equal letters side by side",
                lambda w: any(n > 1 for _, n in runs(w.lower())),
            ),
            Piece("two_vowels", "with exactly two vowels", lambda w: sum(x in VOWELS for x in w.lower()) == 2),
        ]
    )
    change = rng.choice(
        [
            Piece("", "", lambda w: w),
            Piece("", "", lambda w: w),
            Piece("reversed_", "each spelled backwards", lambda w: w[::-1]),
            Piece("upper_", "each in upper case", str.upper),
            Piece("swapped_", "each with the case of its letters swapped", str.swapcase),
            Piece(
                "stripped_",
                "each with its vowels removed",
                lambda w: "".join(x for x in w if x.lower() not in VOWELS),
            ),
            Piece("doubled_", "each with every character written twice", lambda w: "".join(x * 2 for x in w)),
            Piece("trimmed_", "each without its first and last character", lambda w: w[1:-1]),
        ]
    )
    sep = rng.choice(["-", "_", " ", "/", ", "])
    finish, returns = rng.choice(
        [
            (Piece("list", "a list of", list), "List[str]"),
            (Piece("joined", f"a string that joins with {sep!r}", sep.join), "str"),
            (Piece("sorted", "an alphabetically sorted list of", sorted), "List[str]"),
            (
                Piece(
                    "by_length",
                    "a list, sorted by length with ties in the original order, of",
                    lambda v: sorted(v, key=len),
                ),
                "List[str]",
            ),
            (Piece("backwards", "a list, from last to first, of", lambda v: list(v)[::-1]), "List[str]"),
            (
                Piece(
                    "initials",
                    "a string made of the first characters of",
                    lambda v: "".join(w[:1] for w in v),
                ),
                "str",
            ),
            (Piece("total_length", "the total number of characters in", lambda v: sum(map(len, v))), "int"),
            (
                Piece(
                    "longest",
                    "the longest (the earlier one on a tie, the empty string if there is none) of",
                    lambda v: max(v, key=len, default=""),
                ),
                "str",
            ),
            (
                Piece("lengths", "a dictionary from word to length for", lambda v: {w: len(w) for w in v}),
                "Dict[str, int]",
            ),
        ]
    )
    written = f", {change.text}" if change.text else ""
    doc = rng.choice(
        [
            f"Given a list of words {{a}}, return {finish.text} the words {keep.text}{written}.",
            f"From the words in {{a}}, pick those {keep.text}. Return {finish.text} the picked words{written}.",
            f"{{a}} is a list of non-empty strings. The function should return {finish.text} all strings {keep.text}{written}.",
            f"Your task is to return {finish.text} the entries of {{a}} {keep.text}{written}.",
        ]
    )
    lists = [some_words(rng, 6) for _ in range(14)]
    good = [ws for ws in lists if any(keep.apply(w) for w in ws)][: rng.randint(2, 3)]
    if rng.random() < 0.3:
        good.append([])
    slug = f"{finish.slug}_{change.slug}{keep.slug}"
    return Problem(
        f"{slug};{change.slug}{keep.slug};{finish.slug}_{keep.slug};pick_{keep.slug}",
        (("words;strings;names;tokens;lst", "List[str]"),),
        returns,
        doc,
        lambda ws: finish.apply([change.apply(w) for w in ws if keep.apply(w)]),
        [(ws,) for ws in good],
    )


def text_problem(rng: random.Random) -> Problem:
    sentences = [
        "the Quick brown fox",
        "Hello World",
        "a1b22c333",
        "never odd or even",
        "Data, more data!",
        "Tea for 2 at 4",
        "mississippi",
        "Open the door, please",
        "x9 Y8 z7",
        "keep calm",
        "Sun & Moon",
        "bookkeeper",
        "it rains AGAIN",
    ]
    what = rng.choice(
        [
            Piece("vowels", "a vowel", lambda x: x.lower() in VOWELS),
            Piece("consonants", "a consonant", lambda x: x.isalpha() and x.lower() not in VOWELS),
            Piece("capitals", "an upper case letter", str.isupper),
            Piece("lowercase", "a lower case letter", str.islower),
            Piece("digits", "a digit", str.isdigit),
            Piece(
                "late_letters",
                "a letter from the second half of the alphabet (n to z, any case)",
                lambda x: x.isalpha() and x.lower() >= "n",
            ),
            Piece("symbols", "neither a letter nor a digit", lambda x: not x.isalnum()),
        ]
    )
    mark = rng.choice("*#_?-")
    actions: list[tuple[str, str, Callable[[str], Any]]] = [
        (
            "return the string with every such character removed",
            "str",
            lambda s: "".join(x for x in s if not what.apply(x)),
        ),
        (
            "return only these characters, in their order, as one string",
            "str",
            lambda s: "".join(x for x in s if what.apply(x)),
        ),
        (
            f"return a copy of the string in which each of them is replaced by '{mark}'",
            "str",
            lambda s: "".join(mark if what.apply(x) else x for x in s),
        ),
        ("return how many of them there are", "int", lambda s: sum(map(what.apply, s))),
        (
            "return the list of their positions, counted from 0",
            "List[int]",
            lambda s: [i for i, x in enumerate(s) if what.apply(x)],
        ),
        (
            "return the length of the longest stretch of the string made of them alone",
            "int",
            lambda s: max([n for v, n in runs(bool(what.apply(x)) for x in s) if v], default=0),
        ),
        (
            "return the string with these characters in reverse order while all others stay in place",
            "str",
            lambda s: reverse_in_place(s, what.apply),
        ),
        (
            "return the string with these characters moved to the end, keeping both groups in order",
            "str",
            lambda s: "".join(sorted(s, key=what.apply)),
        ),
        (
            "return a dictionary that counts each of them",
            "Dict[str, int]",
            lambda s: dict(Counter(x for x in s if what.apply(x))),
        ),
        (
            "return the first of them, or None if there is none",
            "Optional[str]",
            lambda s: next((x for x in s if what.apply(x)), None),
        ),
    ]
    # Removing the vowels is itself a task of the HumanEval benchmark.
    action, returns, function = rng.choice(actions[1:] if what.slug == "vowels" else actions)
    verb = action.split()[1]
    doc = rng.choice(
        [
            f"Go through {{a}} and look for each character that is {what.text}. Then {action}.",
            f"Find every character of the string {{a}} that is {what.text} and {action}.",
            f"A character of {{a}} is marked if it is {what.text}. Looking at the marked characters, {action}.",
        ]
    )
    stem = {"the": "transform", "only": "keep", "a": "mark", "how": "count"}.get(verb, "scan")
    return Problem(
        f"{stem}_{what.slug};handle_{what.slug};{what.slug}_{stem};{stem}_{what.slug}_in_text",
        (("s;text;string;sentence;txt", "str"),),
        returns,
        doc,
        function,
        [(s,) for s in rng.sample(sentences, rng.randint(2, 4))],
    )


def reverse_in_place(text: str, marked: Callable[[str], bool]) -> str:
    chosen = [x for x in text if marked(x)]
    return "".join(chosen.pop() if marked(x) else x for x in text)


def compress(text: str) -> str:
    return "".join(f"{c}{n}" if n > 1 else c for c, n in runs(text))


def collatz(n: int) -> list[int]:
    return [n] if n == 1 else [n, *collatz(n // 2 if n % 2 == 0 else 3 * n + 1)]


def merge_intervals(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def recurrence(first: list[int], weights: list[int], n: int) -> int:
    values = list(first)
    while len(values) <= n:
        values.append(sum(w * v for w, v in zip(weights, values[::-1], strict=False)))
    return values[n]


def postfix(tokens: str) -> int:
    stack: list[int] = []
    for token in tokens.split():
        if token in ("+", "-", "*"):
            right, left = stack.pop(), stack.pop()
            stack.append({"+": left + right, "-": left - right, "*": left * right}[token])
        else:
            stack.append(int(token))
    return stack[0]


def robot(moves: str) -> tuple[int, int]:
    return moves.count("R") - moves.count("L"), moves.count("U") - moves.count("D")


def spiral(grid: list[list[int]]) -> list[int]:
    return [*grid[0], *spiral([list(row) for row in zip(*grid[1:], strict=True)][::-1])] if grid else []


def singles(rng: random.Random) -> Problem:
    """One of several dozen problems that do not decompose, with its constants and inputs drawn anew."""
    r = rng.randint
    k = r(2, 5)

    def ints(low: int = -9, high: int = 20) -> list[int]:
        return some_ints(rng, low, high, 7)

    xs, xs2, xs3 = ints(), ints(), ints()
    words, words2 = some_words(rng), some_words(rng)
    grid = [[r(0, 9) for _ in range(3)] for _ in range(r(2, 3))]
    grid2 = [[r(0, 9) for _ in range(2)] for _ in range(r(2, 4))]
    n1, n2, n3 = r(3, 12), r(13, 40), r(41, 200)
    text, text2 = letters(rng, "abc", 6, 10), letters(rng, "aab", 4, 9)
    spans = [(low := r(0, 20), low + r(1, 6)) for _ in range(r(3, 5))]
    nums = "nums;numbers;arr;lst;values;xs"
    one = ((nums, "List[int]"),)
    n = (("n;number;num;x", "int"),)
    s = (("s;text;string;word", "str"),)
    ws = (("words;strings;lst", "List[str]"),)
    m = (("grid;matrix;rows;table", "List[List[int]]"),)
    ab = (("a;x;first;left", "List[int]"), ("b;y;second;right", "List[int]"))
    w1, w2 = r(1, 3), r(1, 3)
    lo, hi = r(0, 5), r(10, 18)
    p = rng.choice("?!.")
    ops = "{0} {1} {op} {2} {op2}".format(r(2, 9), r(2, 9), r(2, 9), op=rng.choice("+-*"), op2=rng.choice("+-*"))
    moves = letters(rng, "LRUD", 4, 8)
    point = (r(-5, 5), r(-5, 5))
    mod = rng.choice([7, 10, 11, 13, 97])
    prices = [r(5, 40) for _ in range(6)]
    bits = letters(rng, "01", 5, 9)
    scores = {w: r(0, 100) for w in words}
    dates = ["07:45", "23:10", "00:05", "12:30", "16:59"]
    P = Problem
    menu: list[Callable[[], Problem]] = [
        lambda: P(
            "rotate_left;shift_list;rotate",
            (*one, ("k;steps;places", "int")),
            "List[int]",
            "[[Move|Shift]] the elements of {a} to the left by {b} places; elements that fall off the front come back at the end. {b} may be larger than the length of the list.",
            lambda v, q: v[q % len(v) :] + v[: q % len(v)],
            [(xs, k), (xs2, len(xs2) + 1)],
        ),
        lambda: P(
            "pairs_with_sum;count_pairs;pair_count",
            (*one, ("target;total;goal", "int")),
            "int",
            "Count the pairs of positions i < j for which {a}[i] + {a}[j] equals {b}.",
            lambda v, q: sum(x + y == q for x, y in combinations(v, 2)),
            [(xs, xs[0] + xs[-1]), (xs2, xs2[0] + xs2[1]), ([], 3)],
        ),
        lambda: P(
            "compress;run_length;encode_runs",
            s,
            "str",
            "[[Shorten|Compress]] {a} by writing each run of equal characters as the character followed by the length of the run. A run of length one is written as the character alone.",
            compress,
            [(text,), (text2,), ("",)],
        ),
        lambda: P(
            "expand;decode_runs;unpack",
            s,
            "str",
            "{a} consists of letters, each followed by a single digit. Return the string in which every letter is repeated as often as its digit says.",
            lambda v: "".join(v[i] * int(v[i + 1]) for i in range(0, len(v), 2)),
            [(f"a{r(1, 4)}b{r(1, 3)}",), (f"x{r(2, 5)}y{r(0, 2)}z1",)],
        ),
        lambda: P(
            "steps_to_one;count_steps;chain_length",
            n,
            "int",
            "Starting from {a}, halve the number if it is even, otherwise multiply it by 3 and add 1. Return how many steps it takes to arrive at 1.",
            lambda q: len(collatz(q)) - 1,
            [(1,), (n1,), (n2,)],
        ),
        lambda: P(
            "merge_spans;join_intervals;union_of_ranges",
            (("spans;intervals;ranges", "List[Tuple[int, int]]"),),
            "List[Tuple[int, int]]",
            "Each pair in {a} is a closed interval (start, end). Join all intervals that overlap or touch, and return the result ordered by start.",
            merge_intervals,
            [(spans,), ([(5, 8), (1, 3), (3, 4)],)],
        ),
        lambda: P(
            "nth_term;sequence;series_value",
            n,
            "int",
            f"The sequence f is defined by f(0) = {lo}, f(1) = {k} and f(n) = {w1} * f(n - 1) + {w2} * f(n - 2) for n > 1. Return f({{a}}).",
            lambda q: recurrence([lo, k], [w1, w2], q),
            [(0,), (4,), (r(5, 9),)],
        ),
        lambda: P(
            "triple_sum_sequence;tri;third_order",
            n,
            "List[int]",
            f"A sequence starts with {lo}, {k}, {w1}; every later term is the sum of the three terms before it. Return its first {{a}} terms.",
            lambda q: [recurrence([lo, k, w1], [1, 1, 1], i) for i in range(q)],
            [(2,), (5,), (8,)],
        ),
        lambda: P(
            "evaluate_postfix;calc;rpn",
            (("expression;expr;tokens", "str"),),
            "int",
            "{a} is an arithmetic expression in postfix notation: integers and the operators +, - and *, all separated by single spaces. Return its value.",
            postfix,
            [(ops,), ("7",), ("2 3 + 4 *",)],
        ),
        lambda: P(
            "final_position;walk;follow_moves",
            (("moves;path;commands", "str"),),
            "Tuple[int, int]",
            "A robot starts at (0, 0). The letters of {a} move it by one: 'R' adds 1 to x, 'L' takes 1 away, 'U' adds 1 to y, 'D' takes 1 away. Return the point where it stops.",
            robot,
            [(moves,), ("RRUL",), ("",)],
        ),
        lambda: P(
            "spiral_order;unroll;read_spiral",
            m,
            "List[int]",
            "Return the elements of the rectangular table {a} in clockwise spiral order, beginning with the top left corner.",
            spiral,
            [(grid,), (grid2,)],
        ),
        lambda: P(
            "transpose;flip_axes;columns_to_rows",
            m,
            "List[List[int]]",
            "Turn the rows of {a} into columns, so that the element in row i and column j goes to row j and column i.",
            lambda g: [list(row) for row in zip(*g, strict=True)],
            [(grid,), (grid2,)],
        ),
        lambda: P(
            "rotate_grid;quarter_turn;turn_right",
            m,
            "List[List[int]]",
            "Turn the table {a} clockwise by a quarter and return the new table. All rows have the same length.",
            lambda g: [list(row) for row in zip(*g[::-1], strict=True)],
            [(grid,), (grid2,)],
        ),
        lambda: P(
            "best_row;heaviest_row;row_index",
            m,
            "int",
            "Return the index of the row of {a} with the [[largest|greatest]] sum. If several rows share it, return the smallest index.",
            lambda g: max(range(len(g)), key=lambda i: sum(g[i])),
            [(grid,), (grid2,)],
        ),
        lambda: P(
            "border_sum;frame_total;sum_of_edge",
            m,
            "int",
            "Add up the numbers on the border of the table {a}: its first and last row and its first and last column. Each cell counts once.",
            lambda g: sum(
                x
                for i, row in enumerate(g)
                for j, x in enumerate(row)
                if i in (0, len(g) - 1) or j in (0, len(row) - 1)
            ),
            [(grid,), (grid2,), ([[4]],)],
        ),
        lambda: P(
            "column_maxima;tallest;max_per_column",
            m,
            "List[int]",
            "For each column of {a}, find its largest number. Return these numbers from left to right.",
            lambda g: [max(col) for col in zip(*g, strict=True)],
            [(grid,), (grid2,)],
        ),
        lambda: P(
            "is_magic;equal_sums;same_row_sums",
            m,
            "bool",
            "Return True if all rows of {a} have the same sum, and False otherwise.",
            lambda g: len({sum(row) for row in g}) == 1,
            [(grid,), ([[1, 4], [2, 3]],)],
        ),
        lambda: P(
            "best_profit;max_gain;trade_once",
            (("prices;quotes;values", "List[int]"),),
            "int",
            "{a} holds the price of a share on consecutive days. Buy on one day and sell on a later day: return the largest possible gain, or 0 if there is no way to gain.",
            lambda v: max([y - x for x, y in combinations(v, 2)] + [0]),
            [(prices,), (sorted(prices, reverse=True)[:4],), ([7],)],
        ),
        lambda: P(
            "flip_bits;invert;complement",
            (("bits;binary;s", "str"),),
            "str",
            "{a} is a string of '0' and '1'. Swap each '0' for '1' and the other way round, then drop leading zeros (keep one if nothing else is left).",
            lambda v: "".join("10"[int(x)] for x in v).lstrip("0") or "0",
            [(bits,), ("111",), ("1000",)],
        ),
        lambda: P(
            "longest_ones;ones_run;max_streak",
            (("bits;binary;s", "str"),),
            "int",
            "Return the length of the longest block of consecutive '1' characters in the binary string {a}.",
            lambda v: max(map(len, v.split("0"))),
            [(bits,), ("0",), ("1101110",)],
        ),
        lambda: P(
            "top_names;winners;passed",
            (("scores;points;results", "Dict[str, int]"), ("limit;threshold;minimum", "int")),
            "List[str]",
            "{a} maps names to points. Return the names that reach at least {b} points, the best first; names with equal points are ordered alphabetically.",
            lambda d, q: sorted((w for w in d if d[w] >= q), key=lambda w: (-d[w], w)),
            [(scores, 50), (scores, 20)],
        ),
        lambda: P(
            "invert_mapping;group_keys;by_value",
            (("mapping;d;table", "Dict[str, int]"),),
            "Dict[int, List[str]]",
            "Return a dictionary that maps each value of {a} to the sorted list of the keys that have this value.",
            lambda d: {v: sorted(q for q in d if d[q] == v) for v in d.values()},
            [({"a": 1, "b": 2, "c": 1},), ({w: len(w) for w in words},)],
        ),
        lambda: P(
            "merge_counts;add_tallies;combine",
            (("a;first;left", "Dict[str, int]"), ("b;second;right", "Dict[str, int]")),
            "Dict[str, int]",
            "Add two tallies: the result holds every key of {a} and {b}, with the values of keys found in both added up.",
            lambda u, v: {q: u.get(q, 0) + v.get(q, 0) for q in [*u, *(y for y in v if y not in u)]},
            [({"x": r(1, 5)}, {"x": r(1, 5), "y": 2}), ({}, {"p": 1})],
        ),
        lambda: P(
            "add_minutes;later;clock_after",
            (("time;clock;start", "str"), ("delta;m;extra", "int")),
            "str",
            "{a} is a time of day written as 'HH:MM' on a 24 hour clock. Return the time {b} minutes later in the same form; the clock starts again at '00:00' after '23:59'.",
            lambda t, q: "{:02d}:{:02d}".format(*divmod((int(t[:2]) * 60 + int(t[3:]) + q) % 1440, 60)),
            [(rng.choice(dates), r(10, 90)), ("23:50", r(15, 30))],
        ),
        lambda: P(
            "duration;format_seconds;readable",
            (("seconds;total;n", "int"),),
            "str",
            "Write {a}, a number of seconds, as hours, minutes and seconds in the form 'Hh Mm Ss', leaving out the parts that are zero. Zero seconds are written as '0s'.",
            lambda q: (
                " ".join(f"{v}{u}" for v, u in ((q // 3600, "h"), (q // 60 % 60, "m"), (q % 60, "s")) if v) or "0s"
            ),
            [(r(61, 3000),), (3600 * k,), (0,)],
        ),
        lambda: P(
            "leaders;right_maxima;visible",
            one,
            "List[int]",
            "An element of {a} is a leader if it is [[strictly greater|larger]] than every element after it. Return the leaders in their original order.",
            lambda v: [x for i, x in enumerate(v) if all(x > y for y in v[i + 1 :])],
            [(xs,), (xs2,), ([3, 3],)],
        ),
        lambda: P(
            "window_sums;sliding_total;moving_sums",
            (*one, ("k;width;size", "int")),
            "List[int]",
            "Return the sums of all blocks of {b} neighbouring elements of {a}, from left to right. If the list is too short, return an empty list.",
            lambda v, q: [sum(v[i : i + q]) for i in range(len(v) - q + 1)],
            [(xs, 2), (xs2, 3), ([1], 2)],
        ),
        lambda: P(
            "peaks;local_maxima;find_peaks",
            one,
            "List[int]",
            "Return the positions of all inner elements of {a} that are greater than both of their neighbours.",
            lambda v: [i for i in range(1, len(v) - 1) if v[i - 1] < v[i] > v[i + 1]],
            [(xs,), (xs2,), (xs3,)],
        ),
        lambda: P(
            "balance_point;pivot_index;split_evenly",
            one,
            "int",
            "Return the first position i for which the elements of {a} before i and the elements after i have equal sums, or -1 if there is none. An empty side has sum 0.",
            lambda v: next((i for i in range(len(v)) if sum(v[:i]) == sum(v[i + 1 :])), -1),
            [(xs,), ([1, 7, 3, 6, 5, 6],), ([2, 0, 2],)],
        ),
        lambda: P(
            "interleave;weave;zip_lists",
            ab,
            "List[int]",
            "Take elements in turn from {a} and {b}, beginning with {a}. When one list runs out, append the rest of the other.",
            lambda u, v: [x for i in range(max(len(u), len(v))) for x in [*u[i : i + 1], *v[i : i + 1]]],
            [(xs[:3], xs2), ([], [1])],
        ),
        lambda: P(
            "missing_numbers;gaps;absent",
            one,
            "List[int]",
            "Return all integers between the smallest and the largest element of {a} that are not in the list, in increasing order.",
            lambda v: [x for x in range(min(v), max(v)) if x not in v],
            [(ints(0, 12),), ([4, 7],), ([3],)],
        ),
        lambda: P(
            "divisor_count_is;proper_sum;aliquot",
            n,
            "int",
            "Return the sum of all positive divisors of {a} that are smaller than {a} itself.",
            lambda q: sum(divisors(q)[:-1]),
            [(n1,), (n2,), (1,)],
        ),
        lambda: P(
            "classify_number;kind_of;abundance",
            n,
            "str",
            "Compare {a} with the sum of its divisors smaller than itself. Return 'perfect' if they are equal, 'abundant' if the sum is larger and 'deficient' if it is smaller.",
            lambda q: ("perfect", "abundant", "deficient")[
                0 if sum(divisors(q)[:-1]) == q else 1 if sum(divisors(q)[:-1]) > q else 2
            ],
            [(n1,), (28,), (n2,)],
        ),
        lambda: P(
            "count_primes;primes_in_range;how_many_primes",
            (("low;start;a", "int"), ("high;stop;b", "int")),
            "int",
            "Count the primes p with {a} <= p <= {b}.",
            lambda u, v: sum(map(is_prime, range(u, v + 1))),
            [(2, n1), (n1, n2), (8, 10)],
        ),
        lambda: P(
            "next_prime;prime_after;following_prime",
            n,
            "int",
            "Return the smallest prime that is greater than {a}.",
            lambda q: next(x for x in range(q + 1, 2 * q + 3) if is_prime(x)),
            [(n1,), (n2,), (1,)],
        ),
        lambda: P(
            "digit_product;shrink;persistence",
            n,
            "int",
            "Multiply the digits of {a} to get a new number and repeat until a single digit is left. Return the number of rounds needed.",
            lambda q: persistence(q),
            [(n1,), (n2 + 50,), (n3 + 500,)],
        ),
        lambda: P(
            "digital_root;reduce_digits;final_digit",
            n,
            "int",
            "Add the digits of {a}, then the digits of the result, and so on until one digit remains. Return that digit.",
            lambda q: q and (q - 1) % 9 + 1,
            [(n1,), (n3,), (9_875,)],
        ),
        lambda: P(
            "next_palindrome;palindrome_after;closest_mirror",
            n,
            "int",
            "Return the smallest palindrome that is greater than {a}, written in decimal.",
            lambda q: next(x for x in range(q + 1, 10 * q + 20) if str(x) == str(x)[::-1]),
            [(n1,), (n2,), (n3,)],
        ),
        lambda: P(
            "swap_digits;digit_order;sort_digits",
            n,
            "int",
            "Return the [[largest|greatest]] integer that can be written with exactly the digits of {a}.",
            lambda q: int("".join(sorted(str(q), reverse=True))),
            [(n1,), (n2,), (n3,)],
        ),
        lambda: P(
            "multiples_in;skip_multiples;fizz",
            n,
            "List[str]",
            f"Return a list of strings for the numbers from 1 to {{a}}: 'A' for multiples of {k}, 'B' for multiples of {k + 1}, 'AB' for multiples of both, and the number itself for all others.",
            lambda q: [("A" * (i % k == 0) + "B" * (i % (k + 1) == 0)) or str(i) for i in range(1, q + 1)],
            [(4,), (r(6, 9),)],
        ),
        lambda: P(
            "rescale;clip;limit_values",
            (*one, ("low;lo;minimum", "int"), ("high;hi;maximum", "int")),
            "List[int]",
            "Replace every number of {a} below {b} by {b} and every number above {c} by {c}.",
            lambda v, u, q: [min(max(x, u), q) for x in v],
            [(xs, lo, hi), (xs2, 0, k)],
        ),
        lambda: P(
            "taxi_distance;grid_distance;steps_between",
            (("p;start;a", "Tuple[int, int]"), ("q;end;b", "Tuple[int, int]")),
            "int",
            "Return the number of unit steps along the grid lines needed to walk from the point {a} to the point {b}.",
            lambda u, v: abs(u[0] - v[0]) + abs(u[1] - v[1]),
            [(point, (0, 0)), ((1, 2), (k, -k))],
        ),
        lambda: P(
            "triangle_kind;triangle_type;sides",
            (("a;x;p", "int"), ("b;y;q", "int"), ("c;z;r", "int")),
            "str",
            "Return 'equilateral', 'isosceles' or 'scalene' for a triangle with the sides {a}, {b} and {c}, or 'none' if no triangle with positive area has these sides.",
            lambda u, v, w: (
                "none" if 2 * max(u, v, w) >= u + v + w else ("equilateral", "isosceles", "scalene")[len({u, v, w}) - 1]
            ),
            [(k, k, k), (3, 4, r(5, 9)), (2, 2, 3)],
        ),
        lambda: P(
            "twice_area;polygon_area;shoelace",
            (("points;corners;vertices", "List[Tuple[int, int]]"),),
            "int",
            "Return twice the area of the simple polygon whose corners are listed in {a} in order. The result is a non-negative integer.",
            lambda v: abs(sum(v[i - 1][0] * v[i][1] - v[i][0] * v[i - 1][1] for i in range(len(v)))),
            [([(0, 0), (k, 0), (0, k)],), ([(0, 0), (hi, 0), (hi, k), (0, k)],)],
        ),
        lambda: P(
            "longest_prefix;shared_start;common_start",
            ws,
            "str",
            "Return the longest string with which all words in {a} begin.",
            lambda v: next(v[0][:i] for i in range(len(v[0]), -1, -1) if all(w.startswith(v[0][:i]) for w in v)),
            [(["inside", "insist", "insult"],), (words,), (["sun", "sunny"],)],
        ),
        lambda: P(
            "group_by_length;length_table;words_by_size",
            ws,
            "Dict[int, List[str]]",
            "Return a dictionary that maps each word length to the list of the words in {a} with this length, in their original order.",
            lambda v: {len(w): [u for u in v if len(u) == len(w)] for w in v},
            [(words,), (words2,)],
        ),
        lambda: P(
            "acronym;initials;abbreviate",
            (("phrase;text;name", "str"),),
            "str",
            "Build an acronym from {a}: the first letters of all words with more than three letters, in upper case.",
            lambda v: "".join(w[0].upper() for w in v.split() if len(w) > 3),
            [("world of green energy",), ("the " + " and ".join(words[:2]),)],
        ),
        lambda: P(
            "is_anagram;same_letters;shuffle_of",
            (("a;first;s", "str"), ("b;second;t", "str")),
            "bool",
            "Return True if {b} can be made by rearranging the letters of {a}. Case and spaces are ignored.",
            lambda u, v: sorted(u.lower().replace(" ", "")) == sorted(v.lower().replace(" ", "")),
            [("Night", "thing"), (words[0], words[1]), ("dirty room", "Dormitory")],
        ),
        lambda: P(
            "differences;mismatch_count;hamming",
            (("a;first;s", "str"), ("b;second;t", "str")),
            "int",
            "Count the positions at which {a} and {b} have different characters. Positions that exist in one string only count as different.",
            lambda u, v: sum(x != y for x, y in zip(u, v, strict=False)) + abs(len(u) - len(v)),
            [(words[0], words[1]), (words2[0], words2[0]), ("", "ab")],
        ),
        lambda: P(
            "remove_pairs;cancel_doubles;collapse",
            s,
            "str",
            "Remove two equal neighbouring characters from {a}, and repeat until no two neighbours are equal. Return what is left.",
            cancel,
            [(text,), (text2,), ("abba",)],
        ),
        lambda: P(
            "first_unique;lonely_character;single_letter",
            s,
            "str",
            "Return the first character of {a} that occurs only once, or an empty string if every character is repeated.",
            lambda v: next((x for x in v if v.count(x) == 1), ""),
            [(text,), (rng.choice(NOUNS),), ("aabb",)],
        ),
        lambda: P(
            "count_sentences;questions;ending_count",
            s,
            "int",
            f"Sentences in {{a}} end with '.', '?' or '!'. Return how many of them end with '{p}'.",
            lambda v: v.count(p),
            [("Is it late? Yes! We should go.",), ("Wait. Why? Because! Fine.",)],
        ),
        lambda: P(
            "reverse_long_words;flip_words;mirror_words",
            (("sentence;text;s", "str"),),
            "str",
            f"Return {{a}} with each word of {k + 2} or more letters reversed. Words are separated by single spaces.",
            lambda v: " ".join(w[::-1] if len(w) >= k + 2 else w for w in v.split(" ")),
            [(" ".join(words),), ("a small step",)],
        ),
        lambda: P(
            "snake_case;to_snake;underscore",
            (("name;identifier;s", "str"),),
            "str",
            "Convert the camel case identifier {a} to snake case: put '_' before each capital letter that is not the first character, and make everything lower case.",
            lambda v: re.sub(r"(?<!^)(?=[A-Z])", "_", v).lower(),
            [("maxHeight",), ("ParseTextFile",), ("total",)],
        ),
        lambda: P(
            "camel_case;to_camel;capitalise_parts",
            (("name;identifier;s", "str"),),
            "str",
            "Convert an identifier {a} whose parts are joined by '_' to camel case: the first part stays in lower case, every other part begins with a capital letter.",
            lambda v: v.split("_")[0] + "".join(w.title() for w in v.split("_")[1:]),
            [("read_input_file",), ("_".join(w.lower() for w in words),)],
        ),
        lambda: P(
            "is_valid_code;check_code;accept",
            (("code;s;key", "str"),),
            "bool",
            f"A code is valid if it has at least {k + 2} characters, contains at least one digit and one letter, and begins with a letter. Return whether {{a}} is valid.",
            lambda v: len(v) >= k + 2 and any(x.isdigit() for x in v) and v[0].isalpha(),
            [("a1b2c3d4",), ("9lives",), ("abcdefgh",)],
        ),
        lambda: P(
            "checksum;check_digit;weighted_sum",
            (("code;s;number", "str"),),
            "int",
            f"{{a}} is a string of digits. Multiply the digit at position i (counted from 1) by i, add the results, and return the remainder on division by {mod}.",
            lambda v: sum(i * int(x) for i, x in enumerate(v, 1)) % mod,
            [(str(n3),), (str(r(1000, 99999)),)],
        ),
        lambda: P(
            "sum_of_numbers;add_embedded;numbers_in_text",
            s,
            "int",
            "Return the sum of all whole numbers written in {a}. Digits next to each other form one number.",
            lambda v: sum(map(int, re.findall(r"\d+", v))),
            [(f"{k} cats and {n2} mice",), ("a1b2",), ("none",)],
        ),
        lambda: P(
            "derivative_at;poly_value;evaluate_poly",
            (("coeffs;coefficients;poly", "List[int]"), ("x;t;point", "int")),
            "int",
            "{a}[i] is the coefficient of the power i of a polynomial. Return the value of the polynomial at {b}.",
            lambda v, q: sum(u * q**i for i, u in enumerate(v)),
            [([r(-3, 5) for _ in range(3)], k), ([1, 0, 2], -1)],
        ),
        lambda: P(
            "multiply_polys;poly_product;convolve",
            ab,
            "List[int]",
            "{a} and {b} hold the coefficients of two polynomials, lowest power first. Return the coefficients of their product.",
            lambda u, v: [
                sum(u[i] * v[j - i] for i in range(len(u)) if 0 <= j - i < len(v)) for j in range(len(u) + len(v) - 1)
            ],
            [([1, k], [1, -1]), ([r(1, 4), 0, 2], [3, r(1, 5)])],
        ),
        lambda: P(
            "min_coins;fewest_coins;change",
            (("amount;total;n", "int"),),
            "int",
            f"Return the smallest number of coins worth 1, {k + 1} and {2 * k + 3} that add up to {{a}}.",
            lambda q: fewest(q, (1, k + 1, 2 * k + 3)),
            [(n1,), (n2,), (0,)],
        ),
        lambda: P(
            "ways_to_climb;stair_ways;count_paths",
            n,
            "int",
            f"Count the ways to climb {{a}} stairs if every move takes 1 or {k} stairs. The order of the moves matters.",
            lambda q: climb(q, k),
            [(1,), (n1,), (7,)],
        ),
        lambda: P(
            "parse_pairs;read_settings;to_dict",
            (("text;line;s", "str"),),
            "Dict[str, int]",
            "{a} has the form 'key=value;key=value;...' with integer values. Return it as a dictionary; if a key is repeated, the last value counts.",
            lambda v: {u.split("=")[0]: int(u.split("=")[1]) for u in v.split(";") if u},
            [(f"x={k};y={n1}",), (f"a=1;b=2;a={n2}",), ("",)],
        ),
        lambda: P(
            "bowling;discount;total_price",
            (("prices;costs;items", "List[int]"),),
            "int",
            f"Each price in {{a}} is a whole number. For every {k} items bought, the cheapest item of the whole purchase is free: with m items, the m // {k} cheapest ones cost nothing. Return the total to pay.",
            lambda v: sum(sorted(v)[len(v) // k :]),
            [(prices,), (prices[:2],)],
        ),
        lambda: P(
            "josephus;last_one;survivor",
            n,
            "int",
            f"{{a}} people numbered from 1 stand in a circle. Counting starts at person 1 and every {k}-th person leaves until one is left. Return the number of this person.",
            lambda q: survivor(q, k),
            [(1,), (5,), (n1,)],
        ),
        lambda: P(
            "zigzag;alternates;up_and_down",
            one,
            "bool",
            "Return True if {a} goes up and down in turn: of any two neighbouring steps, one leads to a strictly larger number and the other to a strictly smaller one.",
            lambda v: all((y - x) * (z - y) < 0 for x, y, z in zip(v, v[1:], v[2:], strict=False)),
            [(xs,), ([1, 5, 2, 8, 0],), ([2, 2, 1],)],
        ),
        lambda: P(
            "parking_fee;fee;charge",
            (("duration;m;time", "int"),),
            "int",
            f"Parking costs {k} coins for the first hour and {w1} coins for each further hour that has begun. Parking for at most {lo + 5} minutes is free. Return the fee for {{a}} minutes.",
            lambda q: 0 if q <= lo + 5 else k + max(0, -(-(q - 60) // 60)) * w1,
            [(lo + 3,), (r(61, 119),), (r(121, 400),)],
        ),
        lambda: P(
            "expand_ranges;page_list;parse_ranges",
            (("pages;spec;text", "str"),),
            "List[int]",
            "{a} lists pages such as '1-3,7': single numbers and ranges (both ends included) joined by commas. Return all page numbers in the given order.",
            lambda v: [x for u in v.split(",") for x in range(int(u.split("-")[0]), int(u.split("-")[-1]) + 1)],
            [(f"{lo}-{lo + k},{n2}",), ("4",), (f"2,{n1}-{n1 + 2}",)],
        ),
        lambda: P(
            "to_ranges;shorten_pages;fold_numbers",
            (("pages;nums;numbers", "List[int]"),),
            "str",
            "{a} is a strictly increasing list of integers. Write it as text in which three or more consecutive numbers are shortened to 'first-last', and all parts are joined by commas.",
            fold,
            [([1, 2, 3, 7],), ([lo, lo + 2, lo + 3],), (sorted({*ints(1, 12)}),)],
        ),
        lambda: P(
            "winner;tally;elected",
            (("votes;ballots;names", "List[str]"),),
            "str",
            "Return the name that occurs most often in the non-empty list {a}. If several names are tied, return the one that comes first in the alphabet.",
            lambda v: min(v, key=lambda w: (-v.count(w), w)),
            [(rng.choices(words, k=5),), (words,)],
        ),
        lambda: P(
            "chunks;split_blocks;batches",
            (*one, ("size;k;n", "int")),
            "List[List[int]]",
            "Cut {a} into consecutive blocks of {b} elements. The last block may be shorter.",
            lambda v, q: [v[i : i + q] for i in range(0, len(v), q)],
            [(xs, 2), (xs2, 3), ([], 4)],
        ),
        lambda: P(
            "diagonal_gap;diagonal_difference;compare_diagonals",
            m,
            "int",
            "{a} is a square table. Return the absolute difference between the sums of its two diagonals.",
            lambda g: abs(sum(row[i] - row[-1 - i] for i, row in enumerate(g))),
            [([[r(0, 9) for _ in range(3)] for _ in range(3)],), ([[k, 1], [2, lo]],)],
        ),
        lambda: P(
            "bounces;count_bounces;ball_bounces",
            (("height;h;start", "int"),),
            "int",
            f"A ball falls from {{a}} centimetres. Each time it hits the ground it rises to half of its last height, rounded down. Return how often it hits the ground before it rises to less than {k} centimetres; this last hit counts too.",
            lambda q: hits_until(q, k),
            [(n1,), (n2,), (n3,)],
        ),
        lambda: P(
            "is_chain;linked;word_chain",
            ws,
            "bool",
            "Return True if every word of {a} except the first begins with the last letter of the word before it. Case is ignored.",
            lambda v: all(x[-1].lower() == y[0].lower() for x, y in pairwise(v)),
            [(words,), (["moon", "noon", "Nest"],), (["tree"],)],
        ),
        lambda: P(
            "hide;mask;conceal",
            (*s, ("keep;k;visible", "int")),
            "str",
            "Replace all but the last {b} characters of {a} by '*'.",
            lambda v, q: "*" * max(0, len(v) - q) + v[max(0, len(v) - q) :],
            [(str(n3 * 9173), k), ("ab", 4)],
        ),
        lambda: P(
            "next_vowels;turn_vowels;shift_vowels",
            s,
            "str",
            "Replace each lower case vowel of {a} by the next one in the order a, e, i, o, u; 'u' becomes 'a'. Nothing else changes.",
            lambda v: v.translate(str.maketrans("aeiou", "eioua")),
            [(rng.choice(NOUNS),), (" ".join(words[:2]),)],
        ),
        lambda: P(
            "drops;count_drops;colder_days",
            (("temps;readings;t", "List[int]"), ("d;delta;gap", "int")),
            "int",
            "Count the days on which the temperature in {a} is at least {b} degrees lower than on the day before.",
            lambda v, q: sum(x - y >= q for x, y in pairwise(v)),
            [(xs, 3), (xs2, k), ([5], 1)],
        ),
        lambda: P(
            "triangle_rows;draw_stairs;stairs",
            n,
            "List[str]",
            "Return {a} strings that form a staircase: row i, counted from 1, consists of i copies of '*' and is padded with spaces on the left to a width of {a}.",
            lambda q: [("*" * i).rjust(q) for i in range(1, q + 1)],
            [(1,), (r(2, 4),)],
        ),
        lambda: P(
            "ranks;places;ranking",
            (("scores;points;results", "Dict[str, int]"),),
            "Dict[str, int]",
            "Return a dictionary with the place of every player in {a}. The highest score gets place 1, equal scores share a place, and the places after a tie are skipped.",
            lambda d: {w: 1 + sum(u > d[w] for u in d.values()) for w in d},
            [(scores,), ({"ann": 5, "bob": 9, "cat": 5, "dan": 1},)],
        ),
        lambda: P(
            "fill_shelves;count_boxes;pack",
            (("weights;loads;items", "List[int]"), ("limit;capacity;maximum", "int")),
            "int",
            "Items with the weights {a} are packed in the given order. A new box is opened whenever the next item would push the current box over {b}. No item weighs more than that. Return the number of boxes used.",
            boxes,
            [([r(1, 9) for _ in range(6)], 10), ([4, 6, 5], 10), ([], 5)],
        ),
        lambda: P(
            "seat_index;cell_number;position_of",
            (("label;seat;cell", "str"),),
            "int",
            f"Seats are labelled by a row letter from 'A' on and a number from 1 to {n1}, such as 'B2'. They are counted from 0 through all seats of row A, then row B and so on. Return the index of the seat {{a}}.",
            lambda v: (ord(v[0]) - 65) * n1 + int(v[1:]) - 1,
            [("A1",), (f"B{min(k, n1)}",), (f"D{n1}",)],
        ),
        lambda: P(
            "overlap_length;shared_minutes;common_time",
            (("a;first;p", "Tuple[int, int]"), ("b;second;q", "Tuple[int, int]")),
            "int",
            "{a} and {b} are time spans (start, end) in minutes. Return for how many minutes they overlap.",
            lambda u, v: max(0, min(u[1], v[1]) - max(u[0], v[0])),
            [((0, hi), (k, hi + 9)), ((1, 4), (4, 6)), ((lo, 60), (20, 40))],
        ),
        lambda: P(
            "stable_point;fixed_points;own_index",
            one,
            "List[int]",
            "Return all positions i, counted from 0, at which {a}[i] is equal to i.",
            lambda v: [i for i, x in enumerate(v) if i == x],
            [([0, 4, 2, 3, 1],), (ints(0, 4),), ([7],)],
        ),
        lambda: P(
            "remove_until;drop_prefix;after_first",
            (*one, ("x;mark;value", "int")),
            "List[int]",
            "Return the elements of {a} that come after the first occurrence of {b}. If it does not occur, return the whole list.",
            lambda v, q: v[v.index(q) + 1 :] if q in v else v,
            [(xs, xs[1]), (xs2, 99)],
        ),
        lambda: P(
            "count_turns;direction_changes;reversals",
            one,
            "int",
            "A turn is an element of {a} that is strictly larger or strictly smaller than both the element before and the element after it. Count the turns.",
            lambda v: sum((y - x) * (z - y) < 0 for x, y, z in zip(v, v[1:], v[2:], strict=False)),
            [(xs,), (xs2,), ([1, 2, 3],)],
        ),
        lambda: P(
            "stamp_years;decade_counts;per_decade",
            (("years;dates;values", "List[int]"),),
            "Dict[int, int]",
            "Return a dictionary that maps each decade (1990 stands for the years from 1990 to 1999) to the number of years in {a} that belong to it.",
            lambda v: dict(Counter(x // 10 * 10 for x in v)),
            [([r(1970, 2023) for _ in range(4)],), ([1999, 2000, 2001],)],
        ),
    ]
    return rng.choice(menu)()


def fold(numbers: list[int]) -> str:
    blocks: list[list[int]] = []
    for n in numbers:
        if blocks and blocks[-1][-1] == n - 1:
            blocks[-1].append(n)
        else:
            blocks.append([n])
    return ",".join(f"{b[0]}-{b[-1]}" if len(b) > 2 else ",".join(map(str, b)) for b in blocks)


def hits_until(height: int, limit: int) -> int:
    hits = 1
    while (height := height // 2) >= limit:
        hits += 1
    return hits


def boxes(weights: list[int], limit: int) -> int:
    used, room = 0, 0
    for weight in weights:
        if weight > room:
            used, room = used + 1, limit
        room -= weight
    return used


def persistence(n: int) -> int:
    return 0 if n < 10 else 1 + persistence(math.prod(digits(n)))


def cancel(text: str) -> str:
    stack: list[str] = []
    for c in text:
        if stack and stack[-1] == c:
            stack.pop()
        else:
            stack.append(c)
    return "".join(stack)


def fewest(amount: int, coins: tuple[int, ...]) -> int:
    best = [0]
    for total in range(1, amount + 1):
        best.append(1 + min(best[total - coin] for coin in coins if coin <= total))
    return best[amount]


def climb(n: int, k: int) -> int:
    ways = [1]
    for i in range(1, n + 1):
        ways.append(ways[i - 1] + (ways[i - k] if i >= k else 0))
    return ways[n]


def survivor(n: int, k: int) -> int:
    last = 0
    for size in range(2, n + 1):
        last = (last + k) % size
    return last + 1


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def humaneval(rng: random.Random) -> Prompt:
    make = rng.choices([numbers_problem, words_problem, text_problem, singles], [19, 15, 11, 55])[0]
    problem = make(rng)
    name = rng.choice([part for part in problem.names.split(";") if part])
    if rng.random() < 0.2:
        name = camel(name)
    taken: list[str] = []
    for options, _ in problem.args:
        taken.append(rng.choice([option for option in options.split(";") if option not in taken]))
    style = rng.choice(["typing", "typing", "builtin", "bare", "bare"])
    types = [kind for _, kind in problem.args]

    def spell(kind: str) -> str:
        return (
            kind
            if style == "typing"
            else re.sub(r"List|Dict|Tuple", lambda m: m.group().lower(), kind).replace("Optional[str]", "str | None")
        )

    if style == "bare":
        signature = f"def {name}({', '.join(taken)}):"
    else:
        signature = f"def {name}({', '.join(f'{arg}: {spell(kind)}' for arg, kind in zip(taken, types, strict=True))}) -> {spell(problem.returns)}:"
    used = [part for part in ("Dict", "List", "Optional", "Tuple") if part in " ".join([*types, problem.returns])]
    imports = f"from typing import {', '.join(used)}\n\n" if style == "typing" and used else ""

    doc = expand(rng, problem.doc, {})
    if doc.startswith("Return "):
        doc = (
            rng.choice(
                [
                    "Return ",
                    "Return ",
                    "Return ",
                    "Find and return ",
                    "Your task is to return ",
                    "This function should return ",
                ]
            )
            + doc[7:]
        )
    quoted = rng.random() < 0.15
    for key, arg in zip("abc", taken, strict=False):
        doc = doc.replace(f"{{{key}}}", f"`{arg}`" if quoted else arg)
        doc = re.sub(rf"\b{arg} {arg}\b", arg, doc)
    doc = doc if re.match(r"`|" + "|".join(rf"{arg}\b" for arg in taken), doc) else doc[0].upper() + doc[1:]
    quotes = rng.choice(['"""', '"""', '"""', "'''"])
    shown = [(f"{name}({', '.join(map(repr, case))})", repr(problem.solve(*case))) for case in problem.inputs]
    form = rng.choice(["doctest", "doctest", "doctest", "doctest", "equals", "arrow"])
    if any(result == "None" for _, result in shown):  # a doctest shows no output for None
        form = "equals"
    if form == "doctest":
        examples = "\n".join(f">>> {call}\n{result}" for call, result in shown)
    elif form == "equals":
        examples = (
            rng.choice(["Example:", "Examples:", "For example:"])
            + "\n"
            + "\n".join(f"{call} == {result}" for call, result in shown)
        )
    else:
        examples = (
            rng.choice(["Example:", "Examples"]) + "\n" + "\n".join(f"{call} ➞ {result}" for call, result in shown)
        )
    opening = rng.choice(["", "", "\n", " "])
    gap = rng.choice(["\n", "\n\n"])
    body = textwrap.fill(doc, 84) + gap + examples + "\n"
    if opening == "\n":
        inner = "\n" + textwrap.indent(body, "    ")
    else:
        inner = opening + textwrap.indent(body, "    ").lstrip()
    return Prompt("humaneval-style", f"{SOLVE}{imports}\n{signature}\n    {quotes}{inner}    {quotes}\n\n```")


# --- mt-bench-style ---------------------------------------------------------------------------------------------

CHAT_WORDS = {
    "place": items(
        """Lisbon; Kyoto; Reykjavik; Marrakesh; Buenos Aires; Edinburgh; Vancouver; Hanoi; Cape Town; Istanbul; Seville; Prague; Oaxaca; Tasmania; the Scottish Highlands; the Amalfi Coast; Zanzibar; Budapest; the Faroe Islands; Cusco; Jaipur; Copenhagen; New Orleans; Tbilisi"""
    ),
    "event": items(
        """a team offsite; the product launch; a charity run; the annual science fair; a farewell party; the spring concert; a hackathon; a parent-teacher evening; the budget review; a neighbourhood cleanup; a book club meeting; the open day; a job fair; a first aid course"""
    ),
    "person": items(
        """your landlord; your manager; a former professor; a new neighbour; a hiring manager; the head of customer support; a close friend; a local newspaper; the city council; a supplier; your grandmother; a scholarship committee; a conference organiser; your child's teacher; a potential mentor; an airline"""
    ),
    "mailpurpose": items(
        """to ask for an extension of a deadline; to complain politely about a noisy renovation; to thank them for their help; to request a reference letter; to propose a short meeting; to apologise for a missed appointment; to ask about the status of an application; to cancel a subscription; to introduce a new idea; to follow up after an interview; to report a billing error; to decline an invitation; to ask for a refund; to negotiate a better price; to suggest a change of plan; to ask for advice on a career change; to explain a delay in delivery"""
    ),
    "essay": items(
        """the power of small habits; the value of boredom; remote work and loneliness; adults who learn an instrument; homework and free time; the future of public libraries; noise in big cities; the joy of repairing things; the lessons of failure; slow travel; vegetables grown on a balcony; the ethics of zoos; the four-day working week; second-hand clothes; the lost art of letter writing; artificial intelligence in the classroom; the fascination of maps; living without a car; the first snow of the year; social media as a source of news; community gardens; reading on paper and on screens; the meaning of home; night trains; the importance of sleep; digital minimalism"""
    ),
    "hero": items(
        """a retired clockmaker; a lighthouse keeper; a teenage beekeeper; a tired night nurse; a cartographer of imaginary lands; a robot that paints; a librarian who cannot read one book; a street musician; a deep sea diver; a baker with no sense of taste; an honest thief; a translator for ghosts; a postwoman in the mountains; a gardener on a space station; a chess-playing dog; an astronaut's daughter; a shy detective; a ferry captain"""
    ),
    "plot": items(
        """discovers a letter addressed to their future self; has to cross a frozen lake before dawn; finds a door that was not there yesterday; must return a stolen object; loses all sense of time; receives a call from a stranger with the same name; learns that the town is about to be flooded; wakes up in someone else's house; inherits an empty theatre; hears a song nobody else can hear; makes a promise that is hard to keep; gets stuck in a lift with an old rival; is asked to tell the truth for one whole day"""
    ),
    "tone": items(
        """humorous; melancholic; suspenseful; warm; dreamlike; ironic; formal; playful; optimistic; mysterious; matter-of-fact; nostalgic"""
    ),
    "product": items(
        """a solar-powered backpack; a noise-cancelling alarm clock; a foldable bicycle; a smart watering can; a bamboo keyboard; a reusable notebook; a compact espresso maker; an app for sharing tools; a portable projector; a puzzle subscription box; a self-cleaning bottle; a modular sofa; a hiking boot made of recycled rubber; a language learning card game"""
    ),
    "persona": items(
        """Sherlock Holmes; a medieval blacksmith; a grumpy ship's cook; Marie Curie; a Roman senator; an old tree in a city park; a sports commentator; a stand-up comedian; Ada Lovelace; a kindergarten teacher; a space pirate; a Victorian butler; a stoic philosopher; Leonardo da Vinci; a travel guide in the year 2300; a film director; a cat who owns a bookshop; Socrates; a wise grandmother from a fishing village; a motivational coach; a courtroom lawyer; a wandering knight; a mission control engineer; a chatty barber; Jane Austen; a sarcastic vending machine; Galileo; a weather presenter; a mountain guide; a Martian tourist; Cleopatra; a retired boxer"""
    ),
    "ask": items(
        """how to deal with failure; what the internet is; whether machines can think; what a perfect day looks like; how to make friends in a new city; whether money buys happiness; how to prepare for an exam; why the sky is blue; what you think about modern art; how to bake bread; whether to move abroad; how you solve hard problems; the best way to spend a rainy Sunday; what scares you most; how to choose a career; what makes a good leader; why people tell stories; how to stop procrastinating; what you would change about the world; how black holes work; why people like football; what you had for breakfast; how to give a good speech; how to say sorry"""
    ),
    "job": items(
        """a travel agent; a personal trainer; a museum guide; a job interviewer for a data analyst position; a doctor explaining test results; a customer service agent for a broadband company; a career counsellor; a nutritionist; a relationship coach; a science journalist; a hotel receptionist; a mathematics tutor; a fact checker; a debate moderator; a real estate agent; a game master; a driving instructor; an interior designer; a screenwriter; a librarian"""
    ),
    "client": items(
        """who has never done this before and is nervous; who is in a great hurry; who keeps changing their mind; who has a very small budget; who is convinced they already know everything; who only understands simple words; who has just lost their luggage; who wants a second opinion; who is ten years old; who is sceptical about every suggestion; who brings two noisy children; who has an unusual request"""
    ),
    "name": items(
        """Nora; Tariq; Elena; Jonas; Mei; Oscar; Priya; Luca; Hannah; Kofi; Ingrid; Mateo; Yara; Felix; Amara; Dario; Sven; Leila; Tomas; Ruth"""
    ),
    "item": items("""the red box; the blue box; the green box; the yellow box; the white box; the black box"""),
    "pet": items("""a parrot; a tortoise; a hamster; a goldfish; a rabbit; a ferret; a canary; a gecko"""),
    "fancy": items("""glims; tovers; brillos; wabes; mompets; narls; dorls; quibs; sennets; fints; oblets; crumes"""),
    "trade": items("""a painter; a plumber; a pilot; a dentist; a farmer; a lawyer; a chef; a nurse"""),
    "day": items("""Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday"""),
    "few": items("two; three; four; five; six"),
    "n": [str(n) for n in range(3, 16)],
    "big": [str(n) for n in range(20, 100, 4)],
    "hundred": [str(n) for n in range(120, 960, 30)],
    "percent": items("5; 8; 10; 12; 15; 20; 25; 30; 40; 60"),
    "goods": items("""notebooks; oranges; tickets; candles; marbles; postcards; seedlings; bricks; stamps; mugs"""),
    "codetask": items(
        """parses a log file and reports the ten most frequent error messages; renames all photos in a folder by the date they were taken; finds duplicate files in a directory tree; validates a nested JSON document against a small schema; converts a markdown table to HTML; schedules meetings without conflicts; simulates the game of life on a torus; computes the word frequencies of a very large text file; serves a todo list over HTTP; retries a flaky network call with exponential backoff; finds the shortest route through a maze; prints a calendar for a given month; checks the spelling of a text with a word list; solves the eight queens puzzle; splits a restaurant bill among friends; merges two sorted files without loading them into memory; reads a CSV file and prints summary statistics for each column; generates a random maze; evaluates arithmetic expressions with parentheses; tracks the stock of a small shop; rate limits calls to an API; draws a histogram with text characters; downloads a list of URLs concurrently; computes the similarity of two documents; plays tic-tac-toe without ever losing; compresses a string with Huffman coding; detects cycles in a dependency graph; converts between currencies with cached rates; draws a binary tree as text; diffs two text files line by line; implements undo and redo for a text editor; finds all anagrams in a dictionary"""
    ),
    "language": items("""Python; Python; Python; JavaScript; Java; C++; Go; Rust; TypeScript; C#; Ruby; Kotlin"""),
    "algo": items(
        """quicksort; binary search; Dijkstra's algorithm; a hash table; a bloom filter; depth-first search; dynamic programming; a red-black tree; the union-find structure; a priority queue; the sieve of Eratosthenes; the Knuth-Morris-Pratt algorithm; memoisation; a ring buffer; topological sorting; A* search; reservoir sampling; a segment tree; consistent hashing; a skip list; merge sort; a trie; the two-pointer technique; backtracking"""
    ),
    "codetopic": items(
        """recursion and iteration; threads and processes; SQL and NoSQL databases; stack and heap memory; unit tests and integration tests; REST and GraphQL; static and dynamic typing; lists and tuples in Python; optimistic and pessimistic locking; compilation and interpretation; TCP and UDP; shallow and deep copies; git merge and git rebase; abstract classes and interfaces; symmetric and asymmetric encryption; authentication and authorisation; mutexes and semaphores; caching and buffering; monoliths and microservices; supervised and unsupervised learning"""
    ),
    "stem": items(
        """photosynthesis; plate tectonics; the greenhouse effect; superconductivity; vaccines; the Doppler effect; entropy; the citric acid cycle; gene editing with CRISPR; radioactive decay; lithium batteries; ocean acidification; the Coriolis effect; nuclear fusion; satellite navigation; semiconductors; the immune response to a virus; the life cycle of a star; osmosis; buoyancy; the photoelectric effect; catalysts; magnetic resonance imaging; natural selection; the nitrogen cycle; quantum tunnelling; active noise cancellation; the structure of DNA; chemical equilibrium; the water cycle; antibiotic resistance; suspension bridges; the periodic table; Bayesian inference; the Fourier transform; eclipses; heat pumps; red blood cells; earthquakes; the ozone layer; the Krebs cycle; special relativity; surface tension; transistors; mitosis; dark matter; the carbon cycle; tides; polymers; rocket engines; the p-value; gradient descent; enzyme kinetics; diffusion; lasers; lightning; muscle contraction; the central limit theorem; the Hall effect; hydrogen bonding; volcanoes; gravitational waves; crystallisation; the nervous system; wind turbines; public key cryptography; error-correcting codes; Newton's third law; acids and bases; prions"""
    ),
    "stempair": items(
        """speed and velocity; viruses and bacteria; mitosis and meiosis; fission and fusion; heat and temperature; weather and climate; mass and weight; ionic and covalent bonds; alternating and direct current; DNA and RNA; accuracy and precision; conductors and insulators; series and parallel circuits; plant cells and animal cells; elastic and inelastic collisions; correlation and causation; reflection and refraction; arteries and veins; comets and asteroids; renewable and fossil energy; endothermic and exothermic reactions; lossy and lossless compression; stem cells and specialised cells; transverse and longitudinal waves; isotopes and isomers; permutations and combinations"""
    ),
    "humanity": items(
        """the fall of the Western Roman Empire; the printing press; the French Revolution; the Silk Road; existentialism; the Harlem Renaissance; the Marshall Plan; stoicism; the invention of writing; the Meiji Restoration; colonialism; the Black Death; utilitarianism; the suffragette movement; romantic poetry; the Cold War; feudalism; the Enlightenment; the partition of India; magical realism; the Industrial Revolution; the Magna Carta; the Ottoman Empire; opera; cubism; the Great Depression; inflation; comparative advantage; game theory in politics; the social contract; the Viking expeditions; Gothic architecture; free will; the civil rights movement; the gold standard; nationalism; jazz; the Haitian Revolution; propaganda in wartime; the welfare state; the tragedy of the commons; bilingualism; oral traditions; the Bauhaus; the Hanseatic League; the Reformation; the history of chess; the abolition of slavery; the Mali Empire; the Space Race; urbanisation; the origins of democracy; impressionism; the Treaty of Versailles; the Inca road system; the gig economy; the categorical imperative; the Congress of Vienna; film noir; constitutional monarchy"""
    ),
    "humpair": items(
        """capitalism and socialism; Plato and Aristotle; classical and romantic music; the American and the French Revolution; epic and lyric poetry; realism and idealism in foreign policy; monetary and fiscal policy; Confucianism and Taoism; tragedy and comedy in Greek theatre; the Renaissance and the Baroque; direct and representative democracy; deontology and consequentialism; Athens and Sparta; federal and unitary states; modernism and postmodernism; monopoly and oligopoly; first-person and third-person narration; civil law and common law; the Aztec and the Inca empires; nature and nurture; rhetoric and logic; microeconomics and macroeconomics"""
    ),
    "audience": items(
        """a ten-year-old; a curious high school student; a complete beginner; an experienced engineer from another field; a sceptical relative; a busy manager; first-year university students; a visitor to a science museum; readers of a local newspaper; a friend who dislikes technical terms"""
    ),
    "skill": items(
        """bake sourdough bread; start running; learn a new language; save for a large purchase; prepare for a job interview; set up a home office; plan a vegetable garden; take better photographs; write a short novel; declutter a small flat; learn to play chess; train a puppy; give feedback at work; organise a move; read more books; cook for a week on a small budget"""
    ),
    "limit": items(
        """in fewer than 150 words; in about 200 words; in exactly five sentences; in three short paragraphs; in at most 100 words; in two paragraphs; in about 300 words"""
    ),
    "opinion": items(
        """the best film they have seen; their favourite dish; a museum visit; a disappointing concert; a hiking trip; a new phone; a board game; a historical novel; a budget hotel; an online course; a modern dance performance; a restaurant in a former church; a documentary about the sea; a podcast on history; a second-hand electric car"""
    ),
}

PEOPLE = items(
    """Clara Weiss; Samuel Okoro; Ines Duarte; Henrik Lund; Aiko Tanabe; Rafael Moreno; Bridget Nolan; Omar Haddad; Vera Kovacs; Paul Lindgren; Grace Achebe; Dimitri Antonov"""
)
COMPANIES = items(
    """Northwind Logistics; Bluefern Foods; Halden Optics; Verity Software; Solmar Energy; Pinecrest Furniture; Quanta Bikes; Juniper Textiles; Oakline Books; Tidewater Ferries"""
)
CITIES = items(
    """Bergen; Porto; Leeds; Ghent; Lyon; Austin; Nairobi; Osaka; Turin; Gdansk; Quito; Perth; Halifax; Graz"""
)
MONTHS = items("""January; February; March; April; May; June; September; October; November""")
PRODUCTS = items(
    """desk lamp; rain jacket; kettle; office chair; headset; tent; blender; backpack; keyboard; bicycle pump; camera; monitor; coffee grinder; water filter"""
)
PRAISE = items(
    """it arrived early and works perfectly; the build quality surprised me; I use it every single day; setting it up took two minutes; it looks even better than in the photos"""
)
BLAME = items(
    """it broke after a week; the manual is useless; it was far too loud for our flat; the colour had nothing to do with the picture; support never answered my messages"""
)
MIXED = items(
    """it does its job but nothing more; good idea, average execution; fine for the price, though the strap is weak; I like it, my partner does not; it works, but only after an update"""
)

WRITING = lines("""
[[Write|Draft|Compose]] [[a short|a polite|a friendly|a professional|a concise]] email to <person> <mailpurpose>. [[Keep it under 150 words.|Use a clear subject line.|Be specific but warm.|Avoid clichés.|End with a clear next step.|]]
Write a [[blog post|short essay|newspaper column|speech|newsletter article]] about <essay> [[for <audience>|in a <tone> tone|<limit>|with a surprising opening|that takes a clear position]].
Write a <tone> [[short story|scene|fairy tale|monologue]] in which <hero> <plot>. [[|Keep it to roughly 250 words.|Use the present tense.|End with a question.|Include at least one line of dialogue.|Tell it in the first person.]]
Write the [[opening paragraph|final paragraph|back cover text]] of a novel about <hero> who <plot>.
[[Compose|Write]] a travel [[article|guide|diary entry|blog post]] about [[a weekend|three days|a rainy day|an autumn week]] in <place>, [[mentioning food and people you might meet|for visitors on a tight budget|with a focus on architecture|for families with small children|written as a letter to a friend|that avoids the usual tourist spots]].
Write a product description for <product>. [[Address|Aim it at]] <audience> and [[list three benefits|avoid exaggeration|finish with a slogan|mention one honest drawback]].
Write [[a haiku|a sonnet|a limerick|four rhyming couplets|a poem without rhymes|a poem in free verse]] about <essay>.
Write an invitation to <event>. It takes place on <day> evening, and guests should bring [[something to eat|comfortable shoes|a good story|their own cup|an old photograph]].
Write a [[review|letter|diary entry|social media post]] about <opinion>, as told by <hero>.
Describe [[a crowded market|an abandoned station|a kitchen at dawn|the sea before a storm|a quiet street at midnight|a laboratory after an accident|the first day at a new school]] in <place> using all five senses, <limit>.
Write a dialogue between <hero> and <hero> who disagree about <essay>.
Imagine you have to give a two-minute speech at <event>. Write the speech in a <tone> tone and mention <essay>.
Write step-by-step [[instructions|advice]] for someone who wants to <skill>. Address <audience>.
Outline a [[blog series|workshop|short book|podcast season]] on how to <skill>, with a title and two sentences for each of <few> parts.
Suggest <few> titles for an article about <essay> and explain which one you would choose.
Write a persuasive letter to <person> about <essay>, <limit>.
""")
WRITING_NEXT = lines("""
Rewrite your answer in a <tone> tone.
Now shorten it to half its length without losing the main point.
Rewrite it so that every sentence has fewer than ten words.
Turn your text into a poem of eight lines.
Now write a reply from the point of view of the person addressed or described.
Rephrase your response for <audience>.
Rewrite the text without using the letter [["z"|"q"|"x"|"j"|"k"]].
Rewrite it as a list of bullet points, each starting with a verb.
Point out two weaknesses of your text and mend them.
Continue the text with a surprising turn of <few> sentences.
Add a metaphor or a simile to each sentence.
Translate the first two sentences into [[French|Spanish|German|Italian|Portuguese]].
Give the text three alternative endings.
""")
ROLEPLAY = lines("""
[[Pretend|Imagine]] you are <persona>. [[Someone asks you|A young visitor wants to know|A journalist asks you]] about this: <ask>. [[Answer in character.|Stay in character and be brief.|Answer as they would, with examples from their life.|]]
You are <persona>. Explain <ask> to <audience> in your own voice.
Act as <job> talking to a client <client>. Begin the conversation and ask the first <few> questions you need answered.
I want you to play <job>. I am a client <client>. [[Greet me and tell me how you can help.|Give me your best advice.|Start with one question and wait for my reply.|Explain what will happen next.]]
[[Take on the role|Play the part]] of <persona> and give your opinion on <essay>.
Speak as <persona> who has just heard about <stem> for the first time. How do you react?
[[Write a conversation|Improvise a talk show interview]] in which you, as <persona>, discuss <essay> with <persona>.
Imagine yourself as <hero>. Today something unusual happened: you met <persona>. Tell the story over dinner.
Assume the role of <job>. A client <client> asks you about <essay>. How do you respond?
As <persona>, write a diary entry about a visit to <place>.
You are <persona>, and you must convince <audience> to <skill>. What do you say?
Let's play a text adventure. I am <hero> who <plot>. Describe the first scene and offer me <few> choices.
Answer only as <persona> would. The question is <ask>.
Pretend to be an everyday object in the kitchen of <hero>. Complain about your day in a <tone> way.
""")
ROLEPLAY_NEXT = lines("""
Stay in the same role. What would you say about <ask>?
Still in character, tell me about the greatest mistake you have made.
Now someone disagrees with you strongly. How do you answer?
In the same voice, give a toast of four sentences at <event>.
Do you have any doubts about what you just said?
What would you have said thirty years ago?
Keep the role and explain <stem> in two sentences.
Drop the role now and judge how convincing your answer was.
What do you think of <essay>?
How would you spend one free day in <place>?
""")
REASONING = lines("""
<name:1>, <name:2>, <name:3> and <name:4> sit in a row. <name:1> is not at either end, <name:2> sits somewhere to the left of <name:1>, and <name:3> sits right next to <name:4>. List all the orders that fit.
<name:1>, <name:2> and <name:3> own <pet:1>, <pet:2> and <pet:3>, one each. <name:1> does not own <pet:1>, and <name:2> owns neither <pet:1> nor <pet:2>. Who owns which animal?
Three boxes stand side by side: <item:1>, <item:2> and <item:3>. We know that <item:1> is to the right of <item:2>, and that <item:3> is not in the middle. Which box can be in the middle?
<name:1> is older than <name:2>, and <name:3> is younger than <name:4> but older than <name:1>. Who is the [[oldest|youngest|second oldest]]? Explain your reasoning.
If all <fancy:1> are <fancy:2> and some <fancy:2> are <fancy:3>, does it follow that some <fancy:1> are <fancy:3>? Explain with an example.
If no <fancy:1> are <fancy:2> and all <fancy:3> are <fancy:2>, can anything be both one of the <fancy:1> and one of the <fancy:3>? Explain.
<name:1> lives two floors above <name:2>, <name:3> lives one floor below <name:1>, and <name:4> lives <few> floors above <name:3>. Sort the four from the lowest floor to the highest, and say who might share a floor.
<name:1>, <name:2> and <name:3> work as <trade:1>, <trade:2> and <trade:3>, one each. <name:1> is taller than the person who works as <trade:2>, and <name:3> has never met the person who works as <trade:1> but often plays chess with <name:1>. Which jobs could each of them have?
Five runners finish a race: <name:1> is faster than <name:2>, <name:3> comes in right after <name:1>, <name:4> is last, and <name:5> beats <name:1>. Give the order of arrival.
A clock strikes once every <n> seconds. How many seconds pass from the first strike to strike number <n>? Explain where people usually go wrong.
<name:1> says: "<name:2> always lies." <name:2> says: "<name:1> and I are of the same kind." Each of them either always lies or always tells the truth. Who is who?
<name:1> says: "At least one of <name:2> and me is a liar." If liars always lie and all others always tell the truth, what do you know about the two?
If today is <day>, which day of the week will it be in <hundred> days? Show your reasoning.
A room has <n> lamps, all off. Person k switches every k-th lamp, for k from 1 to <n>. Which lamps are on at the end, if any lamp beyond the last one is ignored?
You have a <n>-litre jug and a <n>-litre jug, and a tap. Which whole amounts of water can you measure, and how?
<name> leaves home walking north for <n> minutes, turns right for <n> minutes, then turns right again for the same time as at first. In which direction is home now? Explain.
<name>, who works as <trade>, claims that an ad works because sales rose by <percent>% after it was shown. Name <few> other explanations and say how to test the claim.
A shop says that <percent>% of its customers return. A rival says that <percent>% of its sales come from returning customers. Which shop has the more loyal customers? Can you tell?
In a race, you overtake the person in place <n>. Which place are you in now? And what if you overtake the last person?
A farmer has to bring <pet>, <pet> and a bag of seeds over a river in a boat that holds one of them at a time. Both animals eat the seeds when left alone with them, and nothing else is at risk. Plan the crossings.
Everyone at a table of <n> shakes hands with everyone else exactly once, except that two of them, <name> and <name>, do not shake hands with each other. How many handshakes are there?
Which word [[does not belong with the others|is the odd one out]]: [[copper, iron, silver, granite|violin, flute, cello, harp|square, cube, circle, triangle|whisper, shout, murmur, listen|river, lake, canal, bridge|oak, birch, tulip, maple|kilogram, metre, second, ruler|trust, doubt, chair, hope]]? Explain your choice, and give a second possible answer.
<name:1> is a [[parent|sibling|cousin]] of <name:2>, and <name:3> is a [[child|sibling|parent]] of <name:2>. How can <name:1> and <name:3> be related?
A bag holds <n> red and <n> blue socks. In complete darkness, how many must you take to be sure of a matching pair? And to be sure of a pair of red ones?
A train leaves <place> and a bus leaves the same stop <n> minutes later at twice the speed of the train. Does the bus ever catch up, and what would you need to know? Reason step by step.
Two friends, <name> and <name>, each think of a number from 1 to <n>. The first says "I do not know whose number is larger." What does the second learn?
Decide whether the argument is valid: "Whenever it rains, <name:1> takes the bus. <name:1> took the bus today. So it rained today." Explain your answer to <audience>.
Suppose <name> must finish <n> tasks, of which each needs <n> minutes, and one of them can only begin when all others are done. Two people help. What is the shortest total time?
""")
REASONING_NEXT = lines("""
Now explain how you would check your answer.
What would you say to somebody who got a different answer?
Write a short Python program that solves this by trying all possibilities.
What changes if one of the statements turns out to be false?
Give a similar puzzle that has exactly one solution.
Add one more condition that makes the puzzle impossible.
Is there another answer that fits? Argue both ways.
Explain the same reasoning to <audience>.
Which assumption did you make without saying so?
Shorten your reasoning to a single sentence.
""")
MATHS_CHAT = lines("""
A [[shop|market stall|museum|school]] sells <goods> at <n> dollars each. On <day> it sells <big> of them, and the day after <percent>% more. How much money does it take in over both days?
<name> has <big> <goods> and gives <n> of them away every day. After how many days are fewer than <n> left?
The [[product|sum]] of two numbers is <hundred> and their difference is <n>. What are the numbers?
What is the remainder when <hundred> to the power <n> is divided by <n>?
A tank holds <hundred> litres. One pump fills it in <n> hours, another empties it in <big> hours. How long does it take to fill the tank when both run?
A fair die is rolled <n> times. What is the probability that the number six appears at least once?
The corners of a triangle lie at (0, 0), (<n>, <n>) and (<n>, 0). Find its area.
Solve the equation x^2 - <big>x + <n> = 0 and explain each step.
Of <hundred> people asked, <percent>% like tea, <percent>% like coffee and 4% like both. How many like neither? First check that the figures can be right.
A car travels <hundred> km at <big> km/h and returns at <big> km/h. What is its average speed for the whole trip?
<name> invests <hundred> dollars at <percent>% interest a year, paid once a year. What is the value after <n> years?
How many three-digit numbers have a digit sum of <n>?
The price of <product> rises by <percent>% and is then cut by <percent>%. By how many percent has it changed in total?
Find all whole numbers x with |2x - <n>| < <big>.
If f(x) = <n>x^2 - <n>x + 1, find f(3), f(-2) and the x at which f is smallest.
<name> and <name> share <hundred> <goods> in the ratio <n> to <n>. How many does each get, rounded to whole <goods>?
How many ways are there to choose <n> people from a group of <big>, and how many if <name> has to be among them?
A rectangle is <n> cm longer than it is wide, and its perimeter is <hundred> cm. What is its area?
A sequence begins with <n>, and each term is <n> more than twice the term before. What is the fifth term?
What is the sum of all multiples of <n> between <big> and <hundred>?
A ladder <big> feet long leans on a wall, with its foot <n> feet from the wall. How high does it reach?
""")
MATHS_NEXT = lines("""
How does the result change if the first number is increased by one?
Now solve the general case with letters in place of the numbers.
Check your result with a different method.
What if every number in the problem is doubled?
Which step is most likely to go wrong, and why?
Round the result to [[the nearest ten|two significant digits|the nearest whole number]] and explain what was lost.
Make up a harder version of this problem and solve it.
Write a short Python function that computes the answer for any input.
""")
CODING = lines("""
Write a [[program|function|class|script]] in <language> that <codetask>. [[|Explain the main design choices.|Handle errors sensibly.|Add a few tests.|Keep it short and readable.|State its time complexity.|Use only the standard library.|Add comments where they help.]]
Explain <algo> to <audience> and show an implementation in <language>.
[[Implement|Write an implementation of]] <algo> in <language>. [[What are its best and worst cases?|Show how it behaves on a small example.|Mention one practical use.|Explain when you would not use it.]]
What is the difference between <codetopic>? [[Give an example of each.|When would you choose one over the other?|Use a short code snippet.|Answer <limit>.|Explain it to <audience>.]]
Review this plan: I want to write a tool in <language> that <codetask>. Which data structures would you choose, and what could go wrong?
Write unit tests in Python for a function that <codetask>. Cover the edge cases.
Write an SQL query that lists [[the three best selling products of each month|all customers without an order in the last year|the second highest salary in every department|the days on which no order was placed|the average delay per airline|pairs of students who attend the same courses]]. Assume sensible tables and state their columns.
Given an array of <big> integers, describe an efficient way to find [[the k smallest sums of two elements|the longest stretch without repeats|two elements with a given difference|the element that occurs more than a third of the time|all pairs that add up to zero|the minimum number of moves to make all equal]] and write it in <language>.
My <language> program that <codetask> is too slow on large inputs. How do I find the reason, and what are typical fixes?
Design the classes for a program that <codetask>, and write their public methods in <language> without bodies.
Use <algo> to solve this: write a program that <codetask>. If that choice makes no sense, say so and pick a better one.
Write a regular expression that matches [[dates such as 3 May 2021|prices with a currency sign|quoted strings with escapes|phone numbers with an optional country code|time ranges such as 9:00-17:30|file paths that end in .csv or .tsv]], and explain each part of it.
""")
CODING_NEXT = lines("""
Can you make it faster? State the new time complexity.
Rewrite it in <language>.
Add error handling for invalid input.
Write three tests that could reveal a bug in it.
Now solve it without recursion, or with recursion if you did not use any.
How would you change it for input that does not fit in memory?
Explain the code line by line to <audience>.
Is there a bug in your answer? Look again carefully.
Reduce the memory it needs.
Refactor it so that the parts can be tested separately.
""")
STEM = lines("""
[[Explain|Describe]] <stem> to <audience>. [[Use an everyday example.|Avoid formulas.|Mention a common misconception.|Answer <limit>.|]]
What is the difference between <stempair>? [[Give two examples.|Why does it matter in practice?|Answer <limit>.|How would you show it in an experiment?]]
How [[was|is|can]] our understanding of <stem> [[shaped by experiments|tested in a laboratory|used in industry|explained at school without mathematics]]? Give concrete cases.
Design a simple experiment that shows [[a basic fact|one consequence]] related to <stem>. List the materials, the steps and possible sources of error.
Which open questions remain about <stem>? Name <few> and explain why they are hard.
How are <stem> and <stem> connected? If they are not, explain what each of them is about.
What would happen on Earth if [[gravity were half as strong|the Moon disappeared|the planet rotated twice as fast|all insects vanished|the atmosphere had twice as much oxygen|the oceans were fresh water|the axis were not tilted|there were no bacteria]]? Discuss at least <few> consequences.
An engineer has to build [[a bridge over a tidal river|a heat shield for a small probe|a hospital in an earthquake zone|a water purifier for a village|a quiet ventilation system|a greenhouse in the desert|a sensor network in a forest|an emergency radio without batteries]]. What are the main design questions and how would you approach them?
A [[car|ball|satellite|cyclist|lift]] of mass <big> kg moves at <n> m/s. What is its kinetic energy, and what happens to that energy when it stops within <n> metres?
Write <few> quiz questions with answers about <stem>, from easy to hard.
Give a short history of the discovery of <stem> and name the people involved.
Balance and explain one chemical reaction that plays a role in <stem>, or say why none does.
Summarise what is known about <stem> in a table with the columns "term", "meaning" and "example".
""")
STEM_NEXT = lines("""
Which part of your explanation is a simplification, and what is the full picture?
Now explain it with an analogy from [[cooking|sports|traffic|music|gardening]].
What evidence supports this?
How would you explain it in a single sentence to <audience>?
Name one application and describe how it works.
What is a common mistake people make about this topic?
How does this relate to <stem>?
Estimate an order of magnitude for a quantity in your answer and show how you got it.
Find one claim in your answer that may be wrong and check it.
""")
HUMANITIES = lines("""
[[Explain|Discuss|Describe]] the [[background|influence|importance|main ideas]] of <humanity> [[for <audience>|<limit>|and give two examples|and name one point on which scholars disagree]].
Compare <humpair>. [[Where do they overlap?|Which differences matter most today?|Use a table.|Answer <limit>.|Support your points with examples.]]
How did <humanity> [[influence|change|reflect]] everyday life? Give concrete examples.
Write an outline for a [[lecture|documentary|school lesson|museum exhibition]] about <humanity>, with <few> sections and one key question for each.
What can <humanity> teach us about <essay>?
Argue for and against the claim that <humanity> still shapes the world we live in. Then give your own judgement.
Is there a link between <humanity> and <humanity>? Explain, and be open about what is uncertain.
Which sources would a historian use to study <humanity>, and what are the limits of each kind of source?
Suggest <few> questions for a class discussion about <humanity> and sketch a good answer to one of them.
Explain how an economist, a historian and an artist would each look at <humanity>.
A student writes that <humanity> can be explained by a single cause. How would you respond?
Discuss whether <essay> is a question for ethics, for economics or for politics.
What is meant by [[opportunity cost|soft power|cultural relativism|the invisible hand|civil disobedience|the unreliable narrator|moral luck|the separation of powers|path dependence|collective memory|price elasticity|dramatic irony]]? Explain it with an example that has to do with <essay>.
""")
HUMANITIES_NEXT = lines("""
Now present the same topic as a dialogue between two people who disagree.
Which of your points would critics attack first?
Draw a parallel to an event of the last fifty years.
Summarise your answer in three sentences for <audience>.
Write a short quiz with <few> questions about your answer.
Name two books or works on this subject and say what they add.
How would someone living at the time have described it?
What would have to be true for your main argument to be wrong?
""")
EXTRACTION_NEXT = lines("""
Now give the same result as [[a markdown table|JSON|CSV|YAML|a numbered list]].
Which details in the text did you leave out, and why?
Sort the entries in reverse order.
Rewrite the text so that it no longer contains any names.
Which of the entries is the most unusual? Give a reason.
Add a short summary of one sentence below the result.
""")


def extraction(rng: random.Random) -> str:
    people, companies = rng.sample(PEOPLE, 4), rng.sample(COMPANIES, 3)
    cities, months, products = rng.sample(CITIES, 4), rng.sample(MONTHS, 3), rng.sample(PRODUCTS, 4)
    years, sums = [rng.randint(1975, 2023) for _ in range(4)], [rng.randint(12, 98) for _ in range(4)]
    form = rng.choice(
        [
            "as a JSON array",
            "as CSV with a header line",
            "in a markdown table",
            "one entry a line",
            "as a YAML list",
            "as a JSON object",
        ]
    )
    kind = rng.randrange(12)
    if kind == 0:
        text = f"{companies[0]}, based in {cities[0]}, reported a revenue of {sums[0]} million dollars and a profit of {sums[1] // 3} million. {companies[1]} from {cities[1]} earned {sums[2]} million but lost {sums[3] // 4} million. {companies[2]} in {cities[2]} did not publish figures."
        task = rng.choice(
            [
                "Extract each company with its city, revenue and profit or loss",
                "For every company named, list the seat and all money amounts",
                "Collect company, city and profit; write null where a value is missing",
            ]
        )
    elif kind == 1:
        text = f"{people[0]} was born in {cities[0]} in {years[0]} and joined {companies[0]} in {years[0] + 24}. {people[1]} grew up in {cities[1]}, studied in {cities[2]} and has worked for {companies[1]} since {years[1]}."
        task = rng.choice(
            [
                "List every person with all places and years linked to them",
                "Extract the names, employers and years",
                "Find all named entities and label each as person, place, organisation or date",
            ]
        )
    elif kind == 2:
        text = "\n".join(
            f"{i}. {a}"
            for i, a in enumerate(
                (
                    f"The {products[0]}: {rng.choice(PRAISE)}.",
                    f"About the {products[1]}: {rng.choice(BLAME)}.",
                    f"The {products[2]}, well: {rng.choice(MIXED)}.",
                    f"My {products[3]}: {rng.choice(PRAISE + BLAME)}.",
                ),
                1,
            )
        )
        task = rng.choice(
            [
                "Rate each review from 1 (angry) to 5 (delighted)",
                "For each review, give the product and whether it is positive, negative or mixed",
                "Classify the sentiment of the reviews and quote the words that decided it",
            ]
        )
    elif kind == 3:
        text = f"Hi all, the workshop with {people[0]} moves from {months[0]} {rng.randint(2, 27)} to {months[1]} {rng.randint(2, 27)}, still in {cities[0]}. {people[1]} books the room, {people[2]} sends the slides by {rng.choice(['Monday', 'Tuesday', 'Friday'])}, and I will order lunch for {sums[0]} people. The budget is {sums[1]}00 euros."
        task = rng.choice(
            [
                "List all tasks with the person responsible and the deadline, if there is one",
                "Extract all dates, numbers and places",
                "Turn the message into a to-do list with owners",
            ]
        )
    elif kind == 4:
        text = (
            "; ".join(
                f"{n} x {p} at {c}.{rng.choice(['00', '50', '95', '20'])} dollars"
                for n, p, c in zip((rng.randint(1, 9) for _ in range(4)), products, sums, strict=True)
            )
            + f". Ordered by {people[0]}, to be shipped to {cities[0]}."
        )
        task = rng.choice(
            [
                "Extract the order lines with quantity, product and unit price, and compute each line's total",
                "Find the most expensive line and the total of the order",
                "List the products in alphabetical order with their quantities",
            ]
        )
    elif kind == 5:
        text = f"The museum of {cities[0]} opened in {years[0]} and had {sums[0]},000 visitors last year. The one in {cities[1]} is older ({years[0] - rng.randint(3, 60)}) but smaller: {sums[1]},000 people came. {cities[2]} closed its museum in {years[2]}; until then about {sums[2]},000 visited every year. Director {people[0]} plans a new one in {cities[3]}."
        task = rng.choice(
            [
                "Extract every museum with its opening or closing year and its visitors",
                "Answer from the text alone: which museum had the most visitors, which is the oldest, and what is planned",
                "Collect all years and say what happened in each",
            ]
        )
    elif kind == 6:
        text = "\n".join(
            f"[{h:02d}:{rng.randint(0, 59):02d}] {rng.choice(['ERROR', 'WARN', 'INFO'])} {m}"
            for h, m in zip(
                sorted(rng.sample(range(6, 23), 5)),
                rng.sample(
                    [
                        "disk almost full on node 3",
                        "login failed for user kim",
                        "backup finished",
                        "payment service timed out",
                        "cache cleared",
                        "certificate expires in 9 days",
                        "restarted worker 7",
                        "slow query took 14 s",
                    ],
                    5,
                ),
                strict=True,
            )
        )
        task = rng.choice(
            [
                "Extract time, level and message of every log entry",
                "List only the entries that need action, the most urgent first",
                "Count the entries by level and give the time of the last one",
            ]
        )
    elif kind == 7:
        dish, grams = (
            rng.choice(["lentil soup", "apple cake", "rice salad", "vegetable curry", "flat bread", "onion pie"]),
            [rng.randint(5, 60) * 10 for _ in range(3)],
        )
        food = rng.sample(
            [
                "flour",
                "carrots",
                "onions",
                "butter",
                "rice",
                "apples",
                "lentils",
                "sugar",
                "tomatoes",
                "yoghurt",
            ],
            3,
        )
        text = f"For the {dish} my aunt {people[0].split()[0]} takes {grams[0]} g of {food[0]}, {grams[1]} g of {food[1]} and, if there is any, {grams[2]} g of {food[2]}. It stands for {sums[0]} minutes and is then cooked for another {sums[1]}. It serves {rng.randint(2, 8)} people, and a pinch of salt is never wrong."
        task = rng.choice(
            [
                "Extract the ingredients with their amounts and mark the optional ones",
                "Give the dish, the ingredients, the total time and the number of servings",
                "Separate the facts needed for cooking from the other remarks",
            ]
        )
    elif kind == 8:
        hours = sorted(rng.sample(range(5, 23), 3))
        text = f"The train to {cities[0]} leaves at {hours[0]}:{rng.choice(['05', '20', '48'])} from platform {rng.randint(1, 14)}. At {hours[1]}:{rng.choice(['10', '35', '52'])} there is a bus to {cities[1]}, but not on Sundays. The night train to {cities[2]} was due at {hours[2]}:15; today it is {sums[0]} minutes late and leaves from platform {rng.randint(1, 14)}."
        task = rng.choice(
            [
                "List every connection with destination, time and means of transport",
                "Extract departure times and platforms; use null where none is given",
                "Which connections depend on the day? List all connections and mark these",
            ]
        )
    elif kind == 9:
        text = f'We asked {sums[0]}0 people in {cities[0]} how they get to work. {sums[1] // 2} percent go by bike, {sums[2] // 4} percent take the bus, and the rest drive or walk. Asked about the new {rng.choice(["tram line", "parking fee", "bike lane", "ring road"])}, {sums[3]} percent were in favour. "It comes {rng.randint(2, 20)} years too late," said {people[0]}, who runs a shop near the station. Mayor {people[1]} called the result encouraging.'
        task = rng.choice(
            [
                "Extract every figure and say what it measures",
                "List who said what, and keep opinions apart from facts",
                "Find the topic, the sample size, the place and all percentages",
            ]
        )
    elif kind == 10:
        animals = rng.sample(
            [
                "red fox",
                "grey heron",
                "pine marten",
                "tawny owl",
                "common toad",
                "roe deer",
                "kingfisher",
                "otter",
            ],
            3,
        )
        text = f"{months[0]} {rng.randint(1, 28)}: two {animals[0]}s near the old bridge, about {sums[0]} metres away, calm. {months[1]} {rng.randint(1, 28)}: one young {animals[1]} at the pond, left when a dog came. {months[2]} {rng.randint(1, 28)}: tracks, probably of a {animals[2]}; I saw nothing myself. Notes by {people[0]}, {cities[0]}, {years[0]}."
        task = rng.choice(
            [
                "Turn the notes into records with date, species, count, place and remarks",
                "Extract the species with the date; mark sightings that are not certain",
                "Which observations are direct and which are indirect? List all with their dates",
            ]
        )
    else:
        text = f'{people[0]} writes about birds and won a prize for "{rng.choice(["Quiet Wings", "The Salt Road", "Winter Ledger"])}" ({years[0]}). "{rng.choice(["A Map of Rain", "Nine Bridges", "The Glass Orchard"])}" by {people[1]} came out {rng.randint(2, 9)} years later and is set in {cities[0]}. In {years[2]}, {people[2]} published "{rng.choice(["Ash and Honey", "Letters to a River", "The Last Ferry"])}", a story about two sisters in {cities[1]}.'
        task = rng.choice(
            [
                "Extract author, title and year of each book",
                "List the books by year, with the author and the setting if it is given",
                "Write one line a book: title, author, subject",
            ]
        )
    opening = rng.choice(
        [
            "From the text below:",
            "Read the following text.",
            "Here is a short text.",
            "Use only the information in this passage.",
            "Below is a passage.",
        ]
    )
    return f"{opening} {task}, {form}.\n\n{text}"


CHAT = {
    "writing": (WRITING, WRITING_NEXT), "roleplay": (ROLEPLAY, ROLEPLAY_NEXT), "reasoning": (REASONING, REASONING_NEXT),
    "maths": (MATHS_CHAT, MATHS_NEXT), "coding": (CODING, CODING_NEXT), "stem": (STEM, STEM_NEXT),
    "humanities": (HUMANITIES, HUMANITIES_NEXT), "extraction": ([], EXTRACTION_NEXT),
}  # fmt: skip


def chat(rng: random.Random) -> Prompt:
    category = rng.choice(list(CHAT))
    firsts, nexts = CHAT[category]
    first = expand(rng, rng.choice(firsts), CHAT_WORDS) if firsts else extraction(rng)
    followups = (expand(rng, rng.choice(nexts), CHAT_WORDS),) if rng.random() < 0.8 else ()
    return Prompt("mt-bench-style", first, followups)


# --- maths-style ------------------------------------------------------------------------------------------------


def maths(rng: random.Random) -> Prompt:
    r = rng.randint
    a, b, c, d, n, m = r(2, 9), r(2, 9), r(2, 12), r(2, 15), r(5, 14), r(20, 90)
    p, q = rng.sample([2, 3, 5, 7, 11, 13], 2)
    x, y, z = rng.choice(["x", "t", "u"]), rng.choice(["y", "v", "w"]), rng.choice(["z", "s", "k"])
    f = rng.choice("fgh")
    triple = rng.choice([(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29)])
    i = r(0, 1)
    j = i + r(1, 2)
    power = rng.choice([2, 3, 4])
    trig = rng.choice([r"\sin", r"\cos"])
    polar = rng.choice(
        [
            r"\frac{\pi}{3}",
            r"\frac{2\pi}{3}",
            r"\frac{5\pi}{6}",
            r"\frac{7\pi}{4}",
            r"\frac{4\pi}{3}",
            r"\frac{3\pi}{4}",
            r"\frac{11\pi}{6}",
        ]
    )
    A, B, C = rng.sample("ABCDEFGHKMNPQRSTXYZ", 3)
    word = rng.choice(
        [
            "BALLOON",
            "PEPPER",
            "TOMORROW",
            "SUCCESS",
            "COFFEE",
            "BANANA",
            "LEVEL",
            "PARALLEL",
            "CASCADE",
            "ORCHARD",
            "MEADOW",
            "GUITAR",
        ]
    )
    find = rng.choice(["Find", "Compute", "Determine"])
    scale = r(1, 4)
    leg, leg2, hyp = (scale * side for side in triple)
    complex_part = rng.choice(
        [
            "$|z w|^2$",
            "the real part of $z^2 w$",
            r"$\frac{z}{w}$ in the form $p + qi$",
            r"the imaginary part of $z \overline{w}$",
        ]
    )
    matrix_part = rng.choice([r"$\det(M^2)$", r"the trace of $M^2$", r"$\det(2M)$", r"the sum of the entries of $M^2$"])
    term = rng.choice([f"({a}k - {b})", f"k(k + {a})", rf"{a} \cdot 2^k", r"\frac{1}{k(k+1)}", "k^3", f"(k^2 - {b})"])
    menu = [
        rf"{find} the sum of all real solutions of ${a}{x}^2 - {m}{x} + {b} = 0$.",
        rf"Let ${f}({x}) = {a}{x}^2 + {b}{x} - {c}$. {find} ${f}({f}({r(-2, 2)}))$.",
        rf"The roots of ${x}^3 - {m}{x}^2 + {c}{x} - {d} = 0$ are $\alpha$, $\beta$ and $\gamma$. {find} $\alpha^2 + \beta^2 + \gamma^2$.",
        rf"The line ${a}x + {b}y = {a * b * c}$ meets the coordinate axes at ${A}$ and ${B}$. What is the area of triangle $O{A}{B}$, where $O$ is the origin?",
        rf"For which real numbers $k$ does ${x}^2 + k{x} + {c * c} = 0$ have exactly one real solution? Give the product of all such $k$.",
        rf"{find} the remainder when ${a + 1}^{{{m}}}$ is divided by ${n + 2}$.",
        rf"What is the units digit of ${m + a}^{{{r(30, 400)}}} + {b}^{{{r(30, 400)}}}$?",
        rf"How many positive divisors does ${p}^{{{a}}} \cdot {q}^{{{b}}}$ have that are perfect squares?",
        rf"{find} the smallest positive integer that leaves a remainder of ${p - 1}$ on division by ${p}$ and a remainder of $1$ on division by ${q}$.",
        rf"How many integers from $1$ to ${m * 10}$ are divisible by ${p}$ but not by ${q}$?",
        rf"{find} the greatest common divisor of ${m * a * b}$ and ${m * a * (b + 1) + a}$.",
        rf"What is the largest integer $k$ such that ${p}^k$ divides ${m}!$?",
        rf"In how many ways can the letters of the word {word} be arranged?",
        rf"A committee of ${a % 4 + 2}$ is chosen from ${n}$ women and ${n - 2}$ men. How many committees contain at least one woman and at least one man?",
        rf"How many paths of length ${a + b}$ lead from $(0,0)$ to $({a},{b})$ if each step goes one unit to the right or one unit up?",
        rf"Two fair ${n}$-sided dice with faces $1, \dots, {n}$ are rolled. What is the probability that the sum is {rng.choice(['a prime number', 'divisible by $3$', f'greater than ${n}$', 'a perfect square', f'exactly ${n}$'])}? Express the answer as a common fraction.",
        rf"A box holds ${a}$ red, ${b}$ white and ${c}$ black marbles. Two are drawn without replacement. What is the probability that they have {rng.choice(['the same colour', 'different colours'])}?",
        rf"A right triangle has legs of length ${leg}$ and ${leg2}$. {find} {rng.choice(['the radius of its inscribed circle', 'the length of the altitude to the hypotenuse', 'the radius of its circumscribed circle', 'the length of the median to the longer leg'])}.",
        rf"Triangle ${A}{B}{C}$ has ${A}{B} = {leg}$, ${B}{C} = {leg2}$ and ${A}{C} = {hyp}$. Point $D$ lies on ${A}{C}$ so that ${B}D$ bisects the angle at ${B}$. {find} ${A}D$.",
        rf"A sphere of radius ${a}$ is cut by a plane at a distance of ${max(a - 1, 1)}$ from its centre. {find} the area of the circle in which they meet, in terms of $\pi$.",
        rf"A regular polygon has interior angles of ${180 - 360 // rng.choice([5, 6, 8, 9, 10, 12, 15, 18, 20])}^\circ$. How many diagonals does it have?",
        rf"A cone has a base radius of ${leg}$ and a height of ${leg2}$. {find} its lateral surface area in terms of $\pi$.",
        rf"The circles with equations $x^2 + y^2 = {a * a}$ and $(x - {a + b})^2 + y^2 = {b * b}$ touch. {find} the length of a common external tangent.",
        rf"In a circle of radius ${c}$, a chord has length ${c}$. {find} the area of the smaller segment cut off by the chord.",
        rf"Square ${A}{B}{C}D$ has side length ${2 * a}$. The midpoints of its sides are joined to form a smaller square, and so on. {find} the sum of the areas of all the squares.",
        rf"Simplify $\frac{{1}}{{\sqrt{{{n}}} + \sqrt{{{n + 1}}}}} + \frac{{1}}{{\sqrt{{{n + 1}}} + \sqrt{{{n + 2}}}}}$.",
        rf"How many solutions does ${trig}({a}{x}) = \frac{{1}}{{{b}}}$ have with $0 \le {x} < {rng.choice(['', '2', '4'])}\pi$?",
        rf"If $\sin \theta = \frac{{{triple[0]}}}{{{triple[2]}}}$ and $\theta$ is {rng.choice(['acute', 'obtuse'])}, {find.lower()} $\{rng.choice(['sin', 'cos', 'tan'])} 2\theta$.",
        rf"Let $z = {a} + {b}i$ and $w = {c} - {a}i$. {find} {complex_part}.",
        rf"{find} the distance from the point $({a}, {b}, {c})$ to the plane ${triple[0]}x + {triple[1]}y = {d}$.",
        rf"Convert the polar point $\left({2 * a}, {polar}\right)$ to rectangular coordinates.",
        rf"The vectors $\begin{{pmatrix}} {a} \\ k \end{{pmatrix}}$ and $\begin{{pmatrix}} {b} \\ {-c} \end{{pmatrix}}$ are perpendicular. {find} $k$.",
        rf"Let $M = \begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}$. {find} {matrix_part}.",
        rf"An arithmetic sequence has first term ${a}$ and common difference ${b}$. {find} the sum of its terms from the ${n}$th to the ${2 * n}$th, inclusive.",
        rf"The second term of a geometric sequence is ${a * b}$ and the fifth is ${a * b**4}$. {find} the {rng.choice(['first', 'third', 'seventh'])} term.",
        rf"Evaluate $\sum_{{k=1}}^{{{n}}} {term}$.",
        rf"Solve $\log_{{{p}}} ({x} + {p**j - p**i}) + \log_{{{p}}} ({x}) = {i + j}$ for ${x}$.",
        rf"If $2^{{{x}}} = {m}$, express $\log_2 {8 * m}$ and $4^{{{x}}}$ in terms of ${x}$ and numbers. What is the sum of the two values?",
        rf"{find} the coefficient of $x^{{{a}}}$ in the expansion of $({b} + x)^{{{a + 3}}}$.",
        rf"When $\left(x^2 + \frac{{{a}}}{{x}}\right)^{{{rng.choice([3, 6, 9])}}}$ is multiplied out, which term does not contain $x$?",
        rf"What is the domain of ${f}(x) = \frac{{\sqrt{{{m} - {a}x}}}}{{x - {b}}}$? Express your answer in interval notation.",
        rf"{find} the {rng.choice(['minimum', 'smallest possible'])} value of ${a}{x} + \frac{{{b}}}{{{x}}}$ for ${x} > 0$.",
        rf"Positive integers ${x}$ and ${y}$ satisfy ${x}{y} + {a}{x} + {a}{y} = {(a + c) * (a + d) - a * a}$. {find} the {rng.choice(['largest', 'smallest'])} possible value of ${x} + {y}$.",
        rf"The operation $\star$ is defined by $p \star q = {a}p - q^2$. If $p \star {b} = {c * a - b * b}$, what is $p$?",
        rf"Write the number ${m * 7}$ in base ${a + 1}$.",
        rf"How many {rng.choice(['three', 'four', 'five'])}-digit numbers have {rng.choice(['strictly increasing digits', 'no digit repeated', 'only odd digits', 'exactly one digit equal to $' + str(a) + '$', 'digits that add up to $' + str(c) + '$', 'an even number of even digits'])}?",
        rf"In how many ways can ${n}$ identical coins be given to ${a % 4 + 3}$ people if {rng.choice(['each gets at least one', 'some may get none', 'each gets at least one and the first gets at least two', 'nobody gets more than half of the coins'])}?",
        rf"${n}$ people sit at a round table. In how many ways can they be seated if {rng.choice(['two of them insist on sitting together', 'two of them refuse to sit together', 'three of them must sit next to each other'])}? Rotations are considered the same.",
        rf"The parabola $y = x^2 - {2 * a}x + {a * a + b}$ has its vertex at ${A}$. {find} the distance from ${A}$ to the origin.",
        rf"A {rng.choice(['cyclist', 'runner', 'boat'])} covers ${a * 12}$ km at ${a + b}$ km/h and comes back at ${a + b + c}$ km/h. What is the average speed for the whole trip, as a common fraction?",
        rf"If ${x} + \frac{{1}}{{{x}}} = {a + 1}$, what is ${x}^{power} + \frac{{1}}{{{x}^{power}}}$?",
        rf"Solve the system $\begin{{cases}} {a}{x} + {b}{y} = {a * c + b * d} \\ {c}{x} - {y} = {c * c - d} \end{{cases}}$ and give ${x}{y}$.",
        rf"{find} the number of integers ${z}$ with $|{a}{z} - {b}| \le {m}$.",
        rf"A geometric series with first term ${a * c}$ has the sum ${a * c * b}$. {find} its common ratio.",
        rf"The graph of $y = {a}|x - {b}| - {c}$ and the $x$-axis enclose a triangle. {find} its area.",
        rf"Let ${f}(x) = \frac{{{a}x + {b}}}{{x - {c}}}$. {find} ${f}^{{-1}}({a + d})$.",
        rf"How many lattice points $(x, y)$ satisfy $x^2 + y^2 \le {n}$?",
        rf"The average of ${n}$ numbers is ${m}$. When the number ${m + n * a}$ is added, what is the new average?"
        if r(0, 1)
        else rf"The average of ${n}$ numbers is ${m}$. One of them is taken away and the average of the rest is ${m + a}$. Which number was taken away?",
    ]
    return Prompt("maths-style", rng.choice(menu) + BOXED)


# --- selection --------------------------------------------------------------------------------------------------

_FRAMING = re.compile(
    r"write a solution to the following problem and make sure that it passes the tests:"
    r"|please reason step by step, and put your final answer within \\boxed\{\}\."
    r"|^write a (python )?(function|program) (to|that|which|for)\b"
    r"|from typing import [^\n]*|```(python)?"
)


def normalise(text: str) -> str:
    """The text without fixed framing sentences, in lower case, with single spaces and no closing punctuation."""
    return " ".join(_FRAMING.sub(" ", text.lower()).split()).rstrip(" .?!")


def shingles(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", normalise(text))
    return (tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))


class Exclusion:
    """The normalised texts and the word shingles of prompts that must not be trained on."""

    def __init__(self, texts: Iterable[str]) -> None:
        kept = list(texts)
        self._exact = {normalise(text) for text in kept}
        self._shingles = {shingle for text in kept for shingle in shingles(text)}

    def hits(self, prompt: Prompt) -> bool:
        texts = (prompt.first, *prompt.followups)
        return any(normalise(t) in self._exact or any(s in self._shingles for s in shingles(t)) for t in texts)


def read_turns(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"--exclude {folder}: expected a folder with *.jsonl files, found none; check the path.")
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            turns = json.loads(line).get("turns")
            if not isinstance(turns, list):
                raise SystemExit(f'{file}, line {number}: expected an object with a list "turns".')
            yield from turns


MAKERS: dict[str, Callable[[random.Random], Prompt]] = {
    "mbpp-style": mbpp, "humaneval-style": humaneval, "mt-bench-style": chat, "maths-style": maths,
}  # fmt: skip


def make(count: int, seed: int, exclusion: Exclusion) -> list[Prompt]:
    """`count` prompts that differ after `normalise`, in the proportions of SHARES and in a mixed order."""
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for place, (source, share) in enumerate(SHARES.items(), 1):
        rng = random.Random(f"{seed}/{source}")
        wanted = round(count * share) if place < len(SHARES) else count - len(prompts)
        misses = 0
        while wanted:
            prompt = MAKERS[source](rng)
            key = normalise(prompt.first)
            if key in seen or exclusion.hits(prompt):
                misses += 1
                if misses > 20 * count + 1000:
                    raise SystemExit(f"--count {count}: {source} cannot supply {wanted} more; ask for fewer.")
                continue
            seen.add(key)
            prompts.append(prompt)
            wanted -= 1
    random.Random(seed).shuffle(prompts)
    return prompts


def record(prompt: Prompt) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": prompt.source, "messages": [{"role": "user", "content": prompt.first}]}
    if prompt.followups:
        entry["followups"] = list(prompt.followups)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--exclude",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help='a folder of *.jsonl files with "turns" to keep clear of; may be repeated',
    )
    args = parser.parse_args()
    exclusion = Exclusion(turn for folder in args.exclude for turn in read_turns(folder))
    prompts = make(args.count, args.seed, exclusion)
    with args.output.open("w", encoding="utf-8") as out:
        for prompt in prompts:
            out.write(json.dumps(record(prompt), ensure_ascii=False) + "\n")
    print(f"{args.output}: {dict(Counter(prompt.source for prompt in prompts))}", file=sys.stderr)


if __name__ == "__main__":
    main()
